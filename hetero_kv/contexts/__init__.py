"""Contexts that outlast the process: what a cache holds, in a file, and back."""
