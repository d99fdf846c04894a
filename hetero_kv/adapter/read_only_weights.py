"""Read-only unpacked weights: a change to the numbers of a packed module would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_kv.errors import UnsupportedModelError

# Functions whose names look like in-place changes, but that change no numbers.
_HARMLESS = frozenset({"requires_grad_", "__int__", "__index__", "__invert__", "__init__", "__instancecheck__"})
_CHANGES = frozenset({"__set__", "__setitem__", "set_data"})


class ReadOnlyWeight(torch.Tensor):
    """A tensor that refuses in-place changes, as do its views; results computed from it are plain tensors.

    PEFT's merging of adapters, for example, adds to `weight.data`.
    """

    _of: str

    @classmethod
    def of(cls, numbers: torch.Tensor, path: str) -> ReadOnlyWeight:
        """A read-only tensor over the same memory. `path` is the module's, for the error."""
        made = numbers.as_subclass(cls)
        made._of = path
        return made

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        changed = [args[0]] if name in _CHANGES or _is_in_place(name) else []
        changed += [kwargs.get("out")]
        own = next((each for each in changed if isinstance(each, cls)), None)
        if own is not None:
            raise UnsupportedModelError(
                f"the weights of {own._of} are packed, so that a change to their unpacked copy ({name}) would be "
                "lost; call hetero_kv.eject(model) first, or set weights to fp32 or bf16"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        source = next((each for each in args if isinstance(each, cls)), None)
        if source is None or result is source or not isinstance(result, torch.Tensor):
            return result
        result = result.as_subclass(torch.Tensor)
        is_view = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        return cls.of(result, source._of) if is_view and name != "as_subclass" else result


def _is_in_place(name: str) -> bool:
    marked = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    return marked and name not in _HARMLESS
