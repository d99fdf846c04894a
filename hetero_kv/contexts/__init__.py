"""Saved contexts: a cache's KV written to a file, and restored in another process."""
