"""The error of this package: a model that cannot be found, fetched or loaded."""

from hetero_kv.errors import HeteroKVError

MOST_CHARACTERS = 500


class ModelError(HeteroKVError):
    """A model that cannot be found, fetched or loaded as asked; the message says what would be right."""


def said(error: BaseException) -> str:
    """What a library's error says, in a line of our own error: its kind and its message, cut where it is long."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
