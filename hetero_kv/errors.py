"""Errors for the user: each names the thing at fault, the value it had, and what would be right."""


class HeteroKVError(ValueError):
    """Base of every error this package raises for a user's mistake."""


class ConfigError(HeteroKVError):
    """A setting, rule or configuration file that cannot be used as written."""


class UnsupportedModelError(HeteroKVError):
    """The model does something that an operator cannot compute exactly."""
