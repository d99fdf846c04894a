"""The error of this package: a model that cannot be found, fetched or loaded."""

from hetero_kv.errors import HeteroKVError


class ModelError(HeteroKVError):
    """A model that cannot be found, fetched or loaded as asked; the message says what would be right."""
