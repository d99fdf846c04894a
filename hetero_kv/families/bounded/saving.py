"""How a bounded layer saves and restores its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.errors import shown
from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy

if TYPE_CHECKING:
    from hetero_kv.families.bounded.layer import BoundedLayer

_SCORE, _CARRIED = "score.", "carried."
_CPU = torch.device("cpu")


def saved(layer: BoundedLayer) -> SavedPart:
    """Returns the layer's saved part; see FamilyLayer."""
    part = SavedPart(
        numbers={
            "seen": layer.length,
            "prompt_length": layer.prompt_length,
            "budget": layer.budget,
            "read": list(layer.read),
        }
    )
    if layer.rotary is not None:
        part.shared["rotary"] = layer.rotary
    entries = layer.entries
    if entries is not None:
        part.put(keys=entries.keys, values=entries.values, positions=entries.positions)
        part.put(**{_SCORE + name: score for name, score in entries.scores.items()})
        for name, value in entries.carried.items():
            if isinstance(value, torch.Tensor):
                part.put(**{_CARRIED + name: value})
            else:
                part.numbers[_CARRIED + name] = _numbers_of(layer.policy, name, value)
    return part


def _numbers_of(policy: EvictionPolicy, name: str, value: object) -> dict[str, int]:
    numbers = policy.saved_memory(name, value)
    if numbers is None:
        raise ContextError(
            f"policy {policy.settings.policy} remembers {name!r}, a {type(value).__name__}, but does not define how "
            "to save it; add `saved_memory` and `restored_memory` to the policy, or store tensors only"
        )
    return numbers


def restore(layer: BoundedLayer, part: SavedPart, target: RestoreTarget) -> None:
    """Restore a layer; see FamilyLayer."""
    length = part.integer("seen", layer.group.length, layer.group.length)
    layer.length, layer.read = length, part.tally("read")
    layer.prompt_length = part.integer("prompt_length", 0, length)
    layer.budget = part.optional_integer("budget", 1)
    if part.has("keys"):
        layer.entries = _restored_entries(layer.policy, part, target, length)
    if layer.policy.reindexed:
        dim, device = target.keys.shape[3], target.keys.device
        layer.rotary = target.shared(part, "rotary", lambda saved: RotaryTable.restored(saved, dim, device))
        if layer.rotary is None or len(layer.rotary) < layer.num_entries:
            raise part.wrong("the rotation of some entries is missing")


def _restored_entries(policy: EvictionPolicy, part: SavedPart, target: RestoreTarget, length: int) -> Entries:
    rows, kv_heads = target.keys.shape[:2]
    keys = part.like("keys", target.keys)
    count = keys.shape[2]
    if count > length:
        raise part.wrong(f"there are {count} entries of {length} tokens")
    values = part.like("values", target.values, count)
    positions = part.indices("positions", (rows, kv_heads, count), torch.int64, length).to(keys.device)
    scores, carried = {}, {}
    for name, tensor in part.tensors.items():
        if name.startswith(_SCORE):
            shape = tensor.shape
            if len(shape) != 3 or tuple(shape[:2]) != (rows, kv_heads) or shape[2] > count:
                raise part.wrong(f"{name} is {list(shape)}; expected {count} entries")
            scores[name.removeprefix(_SCORE)] = tensor.to(keys.device)
        elif name.startswith(_CARRIED):
            if not tensor.ndim or len(tensor) != rows:
                raise part.wrong(f"{name} does not have {rows} rows")
            carried[name.removeprefix(_CARRIED)] = tensor.to(keys.device)
    remembered = {
        name.removeprefix(_CARRIED): _remembered(policy, part, name)
        for name in part.numbers
        if name.startswith(_CARRIED)
    }
    return Entries.of(keys, values, positions, scores, carried | remembered)


def _remembered(policy: EvictionPolicy, part: SavedPart, name: str) -> object:
    numbers = part.numbers[name]
    is_sound = isinstance(numbers, dict) and all(type(number) is int for number in numbers.values())
    value = policy.restored_memory(name.removeprefix(_CARRIED), numbers) if is_sound else None
    if value is None:
        raise part.wrong(f"{name} is {shown(numbers)}, which policy {policy.settings.policy} does not remember")
    return value
