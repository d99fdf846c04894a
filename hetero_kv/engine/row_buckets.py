"""Buckets of rows: a captured forward of as many rows serves any fewer ones."""

from __future__ import annotations


def bucket_of(rows: int) -> int:
    """The rows of the bucket that `rows` rows pass in: a power of two."""
    return 1 << (rows - 1).bit_length()


def rows_of_all(rows: int) -> int:
    """The rows of all buckets that up to `rows` rows pass in."""
    return 2 * bucket_of(rows) - 1
