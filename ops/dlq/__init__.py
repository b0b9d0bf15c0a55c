"""Dead letters as a person works with them: found, shown, replayed, dropped."""
