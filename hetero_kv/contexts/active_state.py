"""The state that determines a model's computation, in addition to its weights: classes, adapters, hooks.

PEFT keeps inactive adapters in a model. The descriptions here exclude them, since a context depends on active parts
only.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero_kv.adapter.foreign import has_global_hooks, is_known_class, is_own
from hetero_kv.adapter.replacement import Operator
from hetero_kv.engine.errors import ContextError

# Attributes that torch gives every module.
_OF_TORCH = frozenset(nn.Module().__dict__) | {"forward", "_hf_hook", "_old_forward"}
# Attributes of transformers' modules that change from prompt to prompt, or compute nothing.
_IDLE = frozenset({"max_seq_len_cached", "gradient_checkpointing"})
# Packages whose hooks are fully described by their class and attributes.
_KNOWN_HOOKS = ("torch.", "transformers.", "accelerate.", "hetero_kv.")
# Hooks of accelerate that move weights without changing them.
_MOVES_ALONE = frozenset({"AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook", "SequentialHook"})
_DEEPEST = 6
_NONE: frozenset[str] = frozenset()
_KEYED = (nn.ModuleDict, nn.ParameterDict, dict)


class ActivePart(NamedTuple):
    """A module that takes part in the computation.

    Attributes:
        path: its path in the original model, without operators and without wrappers whose adapters are all inactive.
        module: the module.
        place: its path in the present model.
        is_known: whether its class is from torch, transformers or this package.
        idle: names of its submodules and parameters that belong to inactive adapters.
    """

    path: str
    module: nn.Module
    place: str
    is_known: bool
    idle: frozenset[str] = frozenset()


def active_parts(model: nn.Module) -> Iterator[ActivePart]:
    """The modules that take part in a model's computation, parents before children."""
    seen: set[int] = set()
    # (module, path, place, inactive adapters in it)
    remaining: list[tuple[nn.Module, str, str, frozenset[str]]] = [(model, "", "", _NONE)]
    while remaining:
        module, path, place, idle = remaining.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, Operator):
            # The operator counts in addition to its wrapped module: it has other hooks, and its buffers are weights.
            yield ActivePart(path, module, place, True)
            remaining.append((module.wrapped, path, _joined(place, "wrapped"), _NONE))
            continue
        is_known = is_known_class(type(module))
        adapters = None if is_known else _adapters(module)
        if adapters is not None:
            effective, every = adapters
            base = getattr(module, "base_layer", None)
            if not effective and isinstance(base, nn.Module):
                remaining.append((base, path, _joined(place, "base_layer"), _NONE))
                continue
            idle = every - effective
        yield ActivePart(path, module, place, is_known, idle)
        for name, child in reversed(module._modules.items()):
            if child is not None and name not in idle:
                of_adapter = idle if isinstance(child, _KEYED) else _NONE
                remaining.append((child, _joined(path, name), _joined(place, name), of_adapter))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _adapters(module: nn.Module) -> tuple[frozenset[str], frozenset[str]] | None:
    """(effective adapters, all adapters) of a PEFT layer; None for another module."""
    names = getattr(type(module), "adapter_layer_names", None)
    if not isinstance(names, tuple) or not hasattr(module, "merged_adapters"):
        return None
    layer: Any = module
    containers = [getattr(layer, name, None) for name in names]
    every = frozenset(str(key) for each in containers if isinstance(each, _KEYED) for key in each)
    merged = frozenset(layer.merged_adapters)
    active = frozenset() if layer.disable_adapters else frozenset(layer.active_adapters)
    return (active & every) | merged, every | merged


def adapted_modules(model: nn.Module) -> list[nn.Module]:
    """The PEFT layers of a model."""
    return [module for module in model.modules() if _adapters(module) is not None]


def effective_adapters(modules: Iterable[nn.Module]) -> tuple[frozenset[str], ...]:
    """The adapters that take part in the computation of each of these PEFT layers."""
    return tuple(adapters[0] for module in modules if (adapters := _adapters(module)) is not None)


def description_of(part: ActivePart) -> str:
    """Describes a module in a text that is equal for modules with equal computation.

    Raises ContextError, naming the module, for a hook or a forward whose computation is unknown.
    """
    module = part.module
    kind = type(module)
    facts: dict[str, Any] = {"hooks": []}
    if has_global_hooks():
        raise ContextError("torch calls global hooks for every module, whose computation is unknown; remove them")
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for hook in hooks.values():
            facts.setdefault("hooks", []).extend(_hook(part, hook))
    own = module.__dict__.get("forward")
    if own is not None and not is_own(own):
        facts.setdefault("hooks", []).extend(_hook(part, module.__dict__.get("_hf_hook", own)))
    # A whole model's attributes are its configuration and its origin.
    if not isinstance(module, Operator) and not hasattr(kind, "save_pretrained"):
        adapters = _adapters(module)
        idle = _NONE
        if adapters is not None:
            facts["adapters"], idle = sorted(adapters[0]), adapters[1] - adapters[0]
        for name, value in module.__dict__.items():
            if name in _OF_TORCH or (part.is_known and (name.startswith("_") or name in _IDLE)):
                continue
            if not part.is_known or _is_simple(value):
                facts[name] = _plain(value, idle)
    return f"{kind.__qualname__} {facts}"


def class_of(part: ActivePart) -> str:
    """The name of a module's class, with its package unless `is_known`."""
    kind = type(part.module)
    return kind.__qualname__ if part.is_known else f"{kind.__module__}.{kind.__qualname__}"


def _hook(part: ActivePart, hook: Any) -> list[Any]:
    """Describes a hook's computation; [] for a hook that only moves weights."""
    kind = hook if inspect.isroutine(hook) else type(hook)
    place = getattr(kind, "__module__", None) or ""
    if not f"{place}.".startswith(_KNOWN_HOOKS):
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise ContextError(
            f"{part.path or 'the model'} ({type(part.module).__name__}) has a forward hook or a replaced forward, "
            f"{place}.{name}, whose computation is unknown, so a saved context cannot depend on it; remove it first"
        )
    if kind.__name__ in _MOVES_ALONE:
        return [facts for each in getattr(hook, "hooks", []) for facts in _hook(part, each)]
    return [kind.__qualname__, _plain(getattr(hook, "__dict__", {}), _NONE)]


def _is_simple(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_simple(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any, idle: frozenset[str], depth: int = 0) -> Any:
    """A value as plain data, without the parts of idle adapters; an object becomes its class and attributes."""
    if isinstance(value, enum.Enum) or (_is_simple(value) and not isinstance(value, list | tuple)):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each, idle, depth) for key, each in value.items() if key not in idle}
    if isinstance(value, list | tuple):
        return [_plain(each, idle, depth) for each in value if not (isinstance(each, str) and each in idle)]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(each, idle, depth)) for each in value if each not in idle)
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return [repr(value.dtype), list(value.shape), hashlib.sha256(numbers.data).hexdigest()]
    if inspect.isroutine(value) or inspect.isclass(value):
        code = getattr(value, "__code__", None)
        inside = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        text = code.co_code.hex() + repr([each for each in code.co_consts if _is_simple(each)]) if code else ""
        name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', '')}"
        return [name, hashlib.sha256(text.encode()).hexdigest(), *_nested(inside, idle, depth)]
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    return [type(value).__qualname__, *_nested([getattr(value, "__dict__", {})], idle, depth)]


def _nested(values: list[Any], idle: frozenset[str], depth: int) -> list[Any]:
    return [_plain(each, idle, depth + 1) for each in values] if depth < _DEEPEST else []
