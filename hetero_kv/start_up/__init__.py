"""What makes a command start fast."""
