"""Errors for the user: each names the thing at fault, the value it had, and what would be right."""


class HeteroKVError(ValueError):
    """Base of every error this package raises for a user's mistake."""


class ConfigError(HeteroKVError):
    """A setting, rule or configuration file that cannot be used as written."""


class UnsupportedModelError(HeteroKVError):
    """The model does something that an operator cannot compute exactly."""


class OutOfMemoryError(HeteroKVError):
    """Memory has no room for what was asked: nothing was allocated, or nothing of it remains."""


#: What torch's allocators, its libraries and C++ say in a RuntimeError: on CPUs, on Windows, on GPUs, elsewhere.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch raised this because it found no memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def said_briefly(error: BaseException) -> str:
    """The kind of a foreign error and the first line of what it says, at most 200 characters of it."""
    first = str(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
