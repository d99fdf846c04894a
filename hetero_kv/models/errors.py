"""The error of this package: a model that cannot be found, fetched or loaded."""

from hetero_kv.errors import HeteroKVError

MOST_CHARACTERS = 500


class ModelError(HeteroKVError):
    """A model that cannot be found, fetched or loaded; the message gives the remedy."""


def error_text(error: BaseException) -> str:
    """A library's error as text for a ModelError: its class and its message, truncated."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
