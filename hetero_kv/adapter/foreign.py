"""What others have put on a model's modules, and how a fast path knows that nobody has.

A fast path reads weights itself and computes what a module of a known class computes. It stands for the module only
while that is all: no hook, no replaced forward, no class of others (PEFT's layers, bitsandbytes', a parametrization),
no tensor that is more than its numbers. Whatever is not known to be plain is called as torch calls it, which is slower
and right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from hetero_kv.errors import UnsupportedModelError

#: Where classes come from whose forward computes what their name says. Quantizers' layers are not among them.
_KNOWN = ("torch.nn.modules.", "transformers.", "hetero_kv.")
_NOT_KNOWN = ("transformers.integrations.", "transformers.quantizers.")
_OURS = ("hetero_kv.", "gpu_ops.")
_SHARDED = ("torch.distributed.",)
# Of torch._dynamo, whose import takes seconds.
_COMPILED = "OptimizedModule"
#: Classes of tensors that are their numbers and nothing else.
PLAIN_TENSORS: set[type] = {nn.Parameter, torch.Tensor}
_OWN_MARK = "_hetero_kv_own"

#: (class, its forward) -> whether both are known.
_known_classes: dict[tuple[type, Any], bool] = {}


def mark_own(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, noted as ours; what somebody else wraps around it is not."""
    # functools.wraps copies attributes: the mark names the function that it belongs to.
    setattr(forward, _OWN_MARK, forward)
    return forward


def is_own(forward: Any) -> bool:
    """Whether the forward of a module's instance is one that this package put there."""
    if getattr(forward, _OWN_MARK, None) is forward:
        return True
    holder = getattr(forward, "__self__", forward)
    return not inspect.isfunction(holder) and type(holder).__module__.startswith(_OURS)


def has_global_hooks() -> bool:
    """Whether torch calls hooks for every module there is."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def is_known_class(kind: type[nn.Module]) -> bool:
    """Whether modules of a class compute what torch, transformers or this package say they do."""
    forward = kind.forward
    key = kind, forward
    known = _known_classes.get(key)
    if known is None:
        places = kind.__module__, getattr(inspect.unwrap(forward), "__module__", None) or ""
        known = all(f"{place}.".startswith(_KNOWN) and not place.startswith(_NOT_KNOWN) for place in places)
        _known_classes[key] = known
    return known


def is_heard_itself(module: nn.Module) -> bool:
    """Whether a module, apart from those in it, has a forward hook, or a forward that somebody has put there."""
    own = module.__dict__.get("forward")
    return bool(module._forward_hooks or module._forward_pre_hooks) or (own is not None and not is_own(own))


def foreign_part(module: nn.Module) -> str | None:
    """What of a module, apart from the modules in it, is not as its class makes it; None where everything is.

    Backward hooks are not looked at: there are no gradients under a HeteroCache.
    """
    if is_heard_itself(module):
        return "a forward hook or a replaced forward"
    kind = type(module)
    if not is_known_class(kind):
        return f"the class {kind.__module__}.{kind.__qualname__}"
    for owner in (module._parameters, module._buffers):
        for name, tensor in owner.items():
            if tensor is not None and type(tensor) not in PLAIN_TENSORS:
                return f"{name}, a {type(tensor).__name__}"
    return None


def is_plain(module: nn.Module) -> bool:
    """Whether a module and all modules in it are as their classes make them, and nobody listens to any of them."""
    return not has_global_hooks() and all(foreign_part(each) is None for each in module.modules())


def is_heard(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether there is something foreign in `module`, or in one of the modules in it, outside of those of a kind."""
    return has_global_hooks() or any(foreign_part(each) is not None for each in _outside(module, kind))


def _outside(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    yield module
    if not isinstance(module, kind):
        for child in module.children():
            yield from _outside(child, kind)


def is_offloaded(model: nn.Module) -> bool:
    """Whether somebody brings a model's weights for each forward (accelerate's offloading): those that are not there
    are not still to be loaded."""
    return any(parameter.is_meta for parameter in model.parameters()) and any(
        not is_own(each.__dict__["forward"]) if "forward" in each.__dict__ else each._forward_pre_hooks
        for each in model.modules()
    )


def require_own_weights(model: nn.Module) -> None:
    """Raise UnsupportedModelError, naming the part, where a model's weights are not all in this process, or it is
    something around a model."""
    if type(model).__name__ == _COMPILED:
        raise UnsupportedModelError(
            "the model is what torch.compile made of one; inject into that one (model._orig_mod), and compile it, if "
            "at all, with model.compile()"
        )
    for path, module in model.named_modules():
        kind = type(module)
        # Classes of torch.distributed, or mixed into the module's (`fully_shard`).
        if any(each.__module__.startswith(_SHARDED) for each in kind.__mro__):
            raise UnsupportedModelError(
                f"{path or 'the model'} is a {kind.__name__}, whose weights are shared out among processes; operators "
                "need a model whose weights are all in this one: load it without FSDP"
            )
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and type(tensor).__module__.startswith(_SHARDED):
                raise UnsupportedModelError(
                    f"{f'{path}.{name}'.lstrip('.')} is a {type(tensor).__name__}, shared out among processes; "
                    "operators need a model whose weights are all in this one: load it without tp_plan and FSDP"
                )


class PlainTree:
    """A module with all modules in it, which `is_plain`; says quickly whether they still are the same.

    A fast path asks before every token, so that all questions are asked at once, by functions written in C.

    Args:
        root: the module.
        attributes: names of the instances' attributes that must stay as they are too.
        parameters: whether parameters must.
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
            # Not buffers: those of a rotation may change from prompt to prompt.
            for owner, held in (
                (each.__dict__, names), (each._modules, each._modules),
                (each._parameters, each._parameters if parameters else ()),
            ):  # fmt: skip
                self._owners += [owner] * len(held)
                self._names += held
        # The objects themselves are held, so that no other comes to have one's id.
        self._held = list(map(dict.get, self._owners, self._names))
        self._ids = list(map(id, self._held))

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was put on the modules, or in the place of one of them or of a parameter."""
        return (
            (self._handles == RemovableHandle.next_id or self._has_no_hooks())
            and list(map(id, map(dict.get, self._owners, self._names))) == self._ids
            and list(map(type, self._modules)) == self._kinds
            and [kind.forward for kind in self._classes] == self._forwards
        )

    def _has_no_hooks(self) -> bool:
        """Whether there are none, which stays so until torch makes the next handle of a hook."""
        handles = RemovableHandle.next_id
        has_some = (
            has_global_hooks()
            or any(map(dict.get, self._instances, repeat("_forward_hooks")))
            or any(map(dict.get, self._instances, repeat("_forward_pre_hooks")))
        )
        if not has_some:
            self._handles = handles
        return not has_some
