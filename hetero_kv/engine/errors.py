"""Errors of the engine."""

from hetero_kv.errors import HeteroKVError


class CacheFullError(HeteroKVError):
    """New tokens exceed `max_seq_len`, or the free blocks shared with forks. Nothing was stored."""


class ContextError(HeteroKVError):
    """A context cannot be saved, or a saved one cannot be continued here. Nothing was changed."""


class DamagedContextError(ContextError):
    """A saved context is cut off, changed, or not written by this project.

    Attributes:
        whole: number of tokens from the beginning whose blocks are intact, if known; else 0.
    """

    def __init__(self, text: object = "", whole: int = 0) -> None:
        super().__init__(text)
        self.whole = whole


class CacheInUseError(HeteroKVError):
    """Two threads use one cache at the same time. The first continues undisturbed."""
