"""Buckets of rows: a captured forward of as many rows serves any fewer ones."""

from __future__ import annotations


def bucket_of(rows: int) -> int:
    """The rows of the bucket that `rows` rows pass in: a power of two."""
    return 1 << (rows - 1).bit_length()
