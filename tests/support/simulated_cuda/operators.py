"""aten's operators on simulated tensors: where they may run, what they launch, and when the host waits."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.support.simulated_cuda.flash import flash_attention, packed_flash_attention
from tests.support.simulated_cuda.tensor import SimulatedTensor, on_cpu, tensors_in

_CPU = torch.device("cpu")
#: Operators whose result, or its shape, the host has to know.
_WAITING = frozenset(
    {
        *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"),
        *("_unique2", "unique_dim", "_linalg_eigh", "linalg_eigh", "_linalg_svd", "linalg_svd"),
    }
)
#: Operators that make room, or another name, and launch nothing.
_IDLE = frozenset(
    {
        *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"),
        *("_unsafe_view", "_reshape_alias", "_local_scalar_dense", "is_same_size"),
    }
)


class _Facts(NamedTuple):
    """Properties of an operator that do not depend on its arguments, looked up once: tiny models run millions.

    Attributes:
        name: aten's.
        launches: whether it is more than another name.
        draws: whether it draws random numbers.
        written: place and name of the arguments that it writes to.
    """

    name: str
    launches: bool
    draws: bool
    written: tuple[tuple[int, str], ...]


@cache
def _facts_of(function: Any) -> _Facts:
    name, arguments = function._schema.name.split("::")[1], enumerate(function._schema.arguments)
    return _Facts(
        name,
        not (function.is_view or name in _IDLE),
        torch.Tag.nondeterministic_seeded in function.tags,
        tuple((place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write),
    )


class Interception(TorchDispatchMode):
    """Operators without simulated tensors: those that make one, or page-locked memory."""

    def __init__(self, simulation: Any) -> None:
        super().__init__()
        self._simulation = simulation


def _intercept(mode: Interception, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if not types and (not kwargs or not (kwargs.get("device") or kwargs.get("pin_memory"))):
        return function(*args, **(kwargs or {}))
    return run(mode._simulation, function, args, kwargs or {})


# Behind the class, whose maker would wrap it for torch's compiler, which takes as long as an operator.
Interception.__torch_dispatch__ = _intercept  # type: ignore[method-assign]


def run(simulation: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """The operator `function`, with whatever tensors. Raises RuntimeError for what CUDA refuses."""
    facts = _facts_of(function)
    name = facts.name
    tensors = tensors_in((args, kwargs))
    ours = [each for each in tensors if isinstance(each, SimulatedTensor)]
    if name == "device":
        return ours[0].place
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if name == "copy_":
        return _copied_into(simulation, *args, **kwargs)
    if name == "_to_copy":
        return _copied(simulation, function, args[0], kwargs, target)
    if not ours and (target is None or target.type != "cuda"):
        return _on_host(simulation, function, args, kwargs)
    if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
        return _indexed(simulation, function, args, kwargs)
    index = _one_device(simulation, name, tensors, ours, target)
    if facts.draws:
        simulation.draw()
    if facts.launches:
        written = _written(facts, args, kwargs)
        simulation.launch(name, index, [each for each in ours if not _among(each, written)], written)
    if name in _WAITING:
        simulation.host_waits(name, simulation.current_stream(index).clock)
    args, kwargs = on_cpu(args), on_cpu(kwargs)
    out = _computed(simulation, name, function, args, kwargs, target)
    if facts.launches:
        simulation.computed(lambda: _computed(simulation, name, function, args, kwargs, target), out)
    return _placed(out, ours, None if target is not None and target.type == "cpu" else index)


def _on_host(simulation: Any, function: Any, args: Any, kwargs: Any) -> Any:
    if not kwargs.get("pin_memory"):
        return function(*args, **kwargs)
    simulation.refuse_capturing("page-locking memory")
    return simulation.pinned.allocated(function(*args, **{**kwargs, "pin_memory": False}))


def _one_device(simulation: Any, name: str, tensors: list[Any], ours: list[Any], target: Any) -> int:
    """The GPU that all tensors lie on. Raises RuntimeError where they do not."""
    indices = {each.place.index for each in ours if each.dim()} or {each.place.index for each in ours}
    foreign = [each for each in tensors if not isinstance(each, SimulatedTensor) and each.dim()]
    if len(indices) > 1 or (ours and foreign):
        places = sorted(f"cuda:{index}" for index in indices) + ["cpu"] * bool(foreign)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(places)}! "
            f"(in {name})"
        )
    if target is not None and target.type == "cuda":
        return simulation.index_of(target)
    return indices.pop()


def _written(facts: _Facts, args: Any, kwargs: Any) -> list[SimulatedTensor]:
    """The arguments that the operator writes to."""
    found = []
    for place, name in facts.written:
        value = args[place] if place < len(args) else kwargs.get(name)
        found += [each for each in tensors_in(value) if isinstance(each, SimulatedTensor)]
    return found


def _among(tensor: torch.Tensor, others: list[SimulatedTensor]) -> bool:
    return any(tensor is other for other in others)


def _computed(simulation: Any, name: str, function: Any, args: Any, kwargs: Any, target: Any) -> Any:
    kwargs = dict(kwargs)
    kwargs.pop("pin_memory", None)
    if target is not None:
        kwargs["device"] = _CPU
    if name == "_scaled_dot_product_flash_attention":
        return flash_attention(simulation.capability, *args, **kwargs)
    if name == "_flash_attention_forward":
        return packed_flash_attention(simulation.capability, *args, **kwargs)
    if name == "histc" and not args[0].is_floating_point():
        # CUDA counts integers, the CPU does not.
        return function(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return function(*args, **kwargs)


def _placed(out: Any, ours: list[SimulatedTensor], index: int | None) -> Any:
    """An operator's results on GPU `index`; None leaves them on the CPU. Written arguments are returned themselves."""
    known = {id(each.data_on_cpu): each for each in ours}

    def placed(data: torch.Tensor) -> torch.Tensor:
        if id(data) in known:
            return known[id(data)]
        return data if index is None else SimulatedTensor(data, index)

    return placed(out) if isinstance(out, torch.Tensor) else tree_map_only(torch.Tensor, placed, out)


# -- copies


def _copied_into(simulation: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`to.copy_(source)`, between any two devices."""
    is_ours, from_ours = isinstance(to, SimulatedTensor), isinstance(source, SimulatedTensor)
    if is_ours and from_ours:
        simulation.launch("copy_", to.place.index, [source], [to])
        target, data = to.data_on_cpu, source.data_on_cpu
        target.copy_(data)
        simulation.computed(lambda: target.copy_(data), target)
        return to
    if not is_ours and not from_ours:
        torch.ops.aten.copy_.default(to, source)
        return to
    host, ours = (source, to) if is_ours else (to, source)
    if not _lie_alike(to, source):
        # The source side converts the numbers, into new memory there.
        if from_ours:
            simulation.launch("copy_", source.place.index, [source], [])
            ours = SimulatedTensor(source.data_on_cpu.to(to.dtype).expand(to.shape).contiguous(), source.place.index)
        else:
            host = source.to(to.dtype).expand(to.shape).contiguous()
    if is_ours:
        is_pinned = host is source and simulation.pinned.covers(host)
        to.data_on_cpu.copy_(host)
        # Pageable memory is read by the driver before the call returns.
        simulation.send(host, to, is_pinned, not non_blocking)
    else:
        is_pinned = _is_dense(to) and simulation.pinned.covers(host)
        simulation.fetch(host, ours, is_pinned, not (non_blocking and is_pinned))
    return to


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one memcpy makes one of the other."""
    return (
        a.dtype is b.dtype
        and a.shape == b.shape
        and ((a.is_contiguous() and b.is_contiguous()) or (a.stride() == b.stride() and _is_dense(a)))
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(tensor) if tensor.device.type == "cpu" else True


def _copied(simulation: Any, function: Any, source: torch.Tensor, kwargs: Any, target: Any) -> torch.Tensor:
    """`source.to(...)`, where a copy is needed."""
    from_ours = isinstance(source, SimulatedTensor)
    to_ours = from_ours if target is None else target.type == "cuda"
    if not from_ours and not to_ours:
        return function(source, **kwargs)
    non_blocking = kwargs.get("non_blocking", False)
    dtype = kwargs.get("dtype") or source.dtype
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    shape = source.data_on_cpu if from_ours else source
    empty = torch.empty_like(shape, dtype=dtype, memory_format=memory_format)
    if to_ours:
        index = simulation.index_of(source.place if target is None else target)
        to: torch.Tensor = SimulatedTensor(empty, index)
    else:
        # As torch does, so that the copy need not be waited for.
        to = simulation.pinned.allocated(empty) if non_blocking else empty
    return _copied_into(simulation, to, source, non_blocking)


# -- indices


def _indexed(simulation: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Reading or writing at places that tensors name; such on the CPU, and masks, have the host wait."""
    tensor, places, *values = args
    for place in places:
        if place is None:
            continue
        if not isinstance(place, SimulatedTensor):
            simulation.send(place, SimulatedTensor(place.clone(), tensor.place.index), False, True)
        if place.dtype in (torch.bool, torch.uint8):
            simulation.launch("nonzero", tensor.place.index, [], [])
            simulation.host_waits("nonzero", simulation.current_stream(tensor.place.index).clock)
    facts = _facts_of(function)
    name = facts.name
    if any(
        isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, SimulatedTensor) for value in values
    ):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got values on cpu")
    ours = [each for each in tensors_in((args, kwargs)) if isinstance(each, SimulatedTensor)]
    written = _written(facts, args, kwargs)
    index = tensor.place.index
    simulation.launch(name, index, [each for each in ours if not _among(each, written)], written)
    args, kwargs = on_cpu(args), on_cpu(kwargs)
    out = function(*args, **kwargs)
    simulation.computed(lambda: function(*args, **kwargs), out)
    return _placed(out, ours, index)
