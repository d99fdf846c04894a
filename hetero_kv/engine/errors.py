"""Errors of the engine."""

from hetero_kv.errors import HeteroKVError


class CacheFullError(HeteroKVError):
    """More tokens were to be stored than `max_seq_len`, or the blocks shared with forks, allow. Nothing was stored."""


class ContextError(HeteroKVError):
    """A context cannot be saved, or a saved one cannot be gone on from here. Nothing was changed."""


class DamagedContextError(ContextError):
    """A saved context does not hold what it should: cut off, changed, or never written by this project.

    Attributes:
        whole: tokens from the beginning on whose blocks are as they were written, where that is known; else 0.
    """

    def __init__(self, text: object = "", whole: int = 0) -> None:
        super().__init__(text)
        self.whole = whole


class CacheInUseError(HeteroKVError):
    """Two threads use one cache at the same time. The first one goes on undisturbed."""
