"""`rollwire demo --feedback`: people click on a live policy's answers, and the policy comes to give what they like."""
