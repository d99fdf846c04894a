"""Errors of the engine."""

from hetero_kv.errors import HeteroKVError


class CacheFullError(HeteroKVError):
    """More tokens were to be stored than `max_seq_len`, or the blocks shared with forks, allow. Nothing was stored."""
