"""Reads GGUF files: headers and their validation, configurations, tokenizers and weights."""
