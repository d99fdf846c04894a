"""Foreign parts of a model's modules, and the check of fast paths for them.

A fast path reads weights itself and computes what a module of a known class computes. It may replace the module only if
the module has no foreign part: no hook, no replaced forward, no third-party class (PEFT's layers, bitsandbytes', a
parametrization), no tensor subclass. A module that is not known to be plain is called as torch calls it, which is
slower and correct.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from hetero_kv.adapter.replacement import Operator
from hetero_kv.errors import UnsupportedModelError

#: Packages with known classes. The layers of quantizers are excluded.
_KNOWN = ("torch.nn.modules.", "transformers.", "hetero_kv.")
_NOT_KNOWN = ("transformers.integrations.", "transformers.quantizers.")
#: Decorators that do not change the result of the wrapped function: torch's own, transformers' choice of how experts
#: are computed, and its support of accelerate's hooks.
_DECORATORS = ("torch.utils.", "transformers.integrations.moe.", "transformers.integrations.accelerate.")
_OURS = "hetero_kv."
_SHARDED = ("torch.distributed.",)
# The name of a class in torch._dynamo, not imported because that takes seconds.
_COMPILED = "OptimizedModule"
#: Classes of tensors without any behaviour of their own.
PLAIN_TENSORS: set[type] = {nn.Parameter, torch.Tensor}
_OWN_MARK = "_hetero_kv_own"

#: (class, its forward) -> whether both are known.
_known_classes: dict[tuple[type, Any], bool] = {}


def mark_own(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `forward` as this package's; a foreign wrapper around it does not count as such."""
    # functools.wraps copies attributes, so the mark names the function that it belongs to.
    setattr(forward, _OWN_MARK, forward)
    return forward


def is_own(forward: Any) -> bool:
    """Whether this package put this forward on a module's instance."""
    if getattr(forward, _OWN_MARK, None) is forward:
        return True
    holder = getattr(forward, "__self__", forward)
    return not inspect.isfunction(holder) and type(holder).__module__.startswith(_OURS)


def has_global_hooks() -> bool:
    """Whether torch has hooks that it calls for every module."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def is_known_class(kind: type[nn.Module]) -> bool:
    """Whether the class is one of torch's, transformers' or this package's, and so is its forward."""
    forward = kind.forward
    key = kind, forward
    known = _known_classes.get(key)
    if known is None:
        places = [kind.__module__, *_homes(forward)]
        known = all(f"{place}.".startswith(_KNOWN) and not place.startswith(_NOT_KNOWN) for place in places)
        _known_classes[key] = known
    return known


def _homes(function: Any) -> Iterator[str]:
    """The Python modules that define a function and those that it wraps, without harmless decorators.

    `functools.wraps` copies a function's `__module__`, so the function's globals decide.
    """
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
        if not f"{home}.".startswith(_DECORATORS):
            yield home
        function = getattr(function, "__wrapped__", None)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a module itself, its children aside, has a forward hook or a replaced forward."""
    own = module.__dict__.get("forward")
    return bool(module._forward_hooks or module._forward_pre_hooks) or (own is not None and not is_own(own))


def foreign_part(module: nn.Module) -> str | None:
    """The part of a module itself, its children aside, that differs from its class; None for a plain module.

    Backward hooks do not count: under a HeteroCache there are no gradients.
    """
    if has_own_hooks(module):
        return "a forward hook or a replaced forward"
    kind = type(module)
    # A user's own operator (`trust_rules`) counts as an operator too.
    if not is_known_class(kind) and not issubclass(kind, Operator):
        return f"the class {kind.__module__}.{kind.__qualname__}"
    for owner in (module._parameters, module._buffers):
        for name, tensor in owner.items():
            if tensor is not None and type(tensor) not in PLAIN_TENSORS:
                return f"{name}, a {type(tensor).__name__}"
    return None


def is_plain(module: nn.Module) -> bool:
    """Whether a module and all modules in it are unchanged instances of their classes, without any hooks."""
    return not has_global_hooks() and all(foreign_part(each) is None for each in module.modules())


def has_hooks(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `module` or a module in it has a foreign part; modules within those of class `kind` are skipped."""
    return has_global_hooks() or any(foreign_part(each) is not None for each in _outside(module, kind))


def _outside(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    yield module
    if not isinstance(module, kind):
        for child in module.children():
            yield from _outside(child, kind)


def is_offloaded(model: nn.Module) -> bool:
    """Whether another library loads a model's weights for each forward (accelerate's offloading).

    Missing weights of such a model need not be loaded.
    """
    return any(parameter.is_meta for parameter in model.parameters()) and any(
        not is_own(each.__dict__["forward"]) if "forward" in each.__dict__ else each._forward_pre_hooks
        for each in model.modules()
    )


def require_own_weights(model: nn.Module) -> None:
    """Raise UnsupportedModelError, naming the part, unless all of a model's weights are in this process.

    A wrapper around a model is refused too.
    """
    if type(model).__name__ == _COMPILED:
        raise UnsupportedModelError(
            "the model is the result of torch.compile; inject into the original model (model._orig_mod), and compile "
            "it with model.compile() if needed"
        )
    for path, module in model.named_modules():
        kind = type(module)
        # Classes of torch.distributed, and classes that mix one in (`fully_shard`).
        if any(each.__module__.startswith(_SHARDED) for each in kind.__mro__):
            raise UnsupportedModelError(
                f"{path or 'the model'} is a {kind.__name__}, whose weights are sharded across processes; operators "
                "need a model with all its weights in this process: load it without FSDP"
            )
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and type(tensor).__module__.startswith(_SHARDED):
                raise UnsupportedModelError(
                    f"{f'{path}.{name}'.lstrip('.')} is a {type(tensor).__name__}, sharded across processes; "
                    "operators need a model with all its weights in this process: load it without tp_plan and FSDP"
                )


class PlainTree:
    """Detects quickly whether a plain module tree (`is_plain`) has changed.

    A fast path checks before every token, so that all checks run together, in functions written in C.

    Args:
        root: the module.
        attributes: names of instance attributes that must not change either.
        parameters: whether parameters must not change.
    """

    def __init__(self, root: nn.Module, attributes: tuple[str, ...] = (), *, parameters: bool = True) -> None:
        self._modules = list(root.modules())
        self._kinds = [type(each) for each in self._modules]
        self._classes = list(dict.fromkeys(self._kinds))
        self._forwards = [kind.forward for kind in self._classes]
        self._handles = -1
        self._instances = [each.__dict__ for each in self._modules]
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        for each in self._modules:
            names = "forward", *(name for name in attributes if name in each.__dict__)
            # Without buffers: those of a rotary embedding may change from prompt to prompt.
            for owner, keys in (
                (each.__dict__, names), (each._modules, each._modules),
                (each._parameters, each._parameters if parameters else ()),
            ):  # fmt: skip
                self._owners += [owner] * len(keys)
                self._names += keys
        self._objects = list(map(dict.get, self._owners, self._names))

    @property
    def is_unchanged(self) -> bool:
        """Whether no hook was added, and no module, class, forward or checked parameter was replaced."""
        return (
            (self._handles == RemovableHandle.next_id or self._has_no_hooks())
            and all(map(is_, map(dict.get, self._owners, self._names), self._objects))
            and list(map(type, self._modules)) == self._kinds
            and [kind.forward for kind in self._classes] == self._forwards
        )

    def _has_no_hooks(self) -> bool:
        """Whether there are no hooks; the result is cached until torch creates the next hook handle."""
        handles = RemovableHandle.next_id
        has_some = (
            has_global_hooks()
            or any(map(dict.get, self._instances, repeat("_forward_hooks")))
            or any(map(dict.get, self._instances, repeat("_forward_pre_hooks")))
        )
        if not has_some:
            self._handles = handles
        return not has_some
