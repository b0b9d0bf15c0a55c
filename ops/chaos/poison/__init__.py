"""What nobody should send to a feedback gateway, and how to send it: inputs with the answers that they must get."""
