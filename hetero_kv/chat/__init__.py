"""The chat command: its flags, the interactive terminal, and the JSON report of a single answer."""
