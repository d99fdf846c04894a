"""Speculation: guesses at the next tokens of an answer, verified several at a time, a way to guess in a file."""
