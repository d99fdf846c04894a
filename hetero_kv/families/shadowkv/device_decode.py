"""Decoding on a GPU: what is chosen, held and missing stays there, and the host waits for nothing (section 4.2).

Lists of missing chunks have the size of what is chosen. Their values come over the bus, read by a kernel where they lie
in page-locked DRAM, on a stream of its own, beside the attention to Recent and the rebuilding of their keys.
"""

from __future__ import annotations

import torch

from gpu_ops.kernel_choice import runs_triton
from gpu_ops.rebuild import rebuild_into
from gpu_ops.resident_slots import fetch, placed
from gpu_ops.side_stream import beside, joined
from hetero_kv.engine.step import Step
from hetero_kv.families.shadowkv.layer import LowRankLayer
from hetero_kv.families.shadowkv.resident_chunks import ResidentChunks


def serves(layer: LowRankLayer, keys: torch.Tensor) -> bool:
    """Whether the kernels can hold chunks for this layer: on a GPU that Triton knows, with values that are mapped."""
    return runs_triton(keys) and layer.values_are_mapped()


class Holding:
    """Has the slots hold chosen chunks: values are asked for when it is made, keys when it is `finished`.

    Within `joined_on_error`: what a stream of its own reads is held by this object, and by the step.

    Args:
        wanted: the chosen chunks, [batch, kv_heads, n] int64, without repetition in a head.
    """

    def __init__(self, layer: LowRankLayer, step: Step, wanted: torch.Tensor) -> None:
        assert layer.context.outliers is not None
        self._layer, self._residents = layer, layer.context.outliers.residents
        device, count = wanted.device, wanted.shape[2]
        residents = self._residents
        residents.provide(count, device)
        if not count:
            return
        missed = layer.missed.row(wanted.shape[0] * wanted.shape[1], device)
        residents.ids, self._misses, self._into = placed(residents.ids, wanted, missed)
        table = step.table_on(device, layer.layout)
        raw = None if layer.value_storage.is_plain else _raw_values(layer, self._misses)
        with beside(device):
            _fetch_values(layer, residents, table, self._misses, self._into, raw)

    def finished(self) -> ResidentChunks:
        """The chunks that are held, for what is queued from now on."""
        residents, factors = self._residents, self._layer.factors
        if residents.ids.shape[2]:
            assert factors.basis is not None
            assert factors.rotary is not None
            rotary = factors.rotary
            given = factors.coefficients.entries, factors.basis, rotary.cos, rotary.sin, rotary.rotation.layout
            rebuild_into(*given, self._misses, self._into, residents.key_slots)
            joined(residents.value_slots)
        return residents


def _raw_values(layer: LowRankLayer, misses: torch.Tensor) -> torch.Tensor:
    """Room for missing chunks as they are stored, one behind the other."""
    assert layer.pool is not None
    stored = layer.pool.values
    return torch.empty(*misses.shape, *stored.shape[2:], dtype=stored.dtype, device=misses.device)


def _fetch_values(
    layer: LowRankLayer, residents: ResidentChunks, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor,
    raw: torch.Tensor | None,
) -> None:  # fmt: skip
    """Have missing values read from DRAM into their slots, through `raw` where they are quantised there."""
    assert layer.pool is not None
    stored, slots = layer.pool.values, residents.value_slots
    if raw is None:
        fetch(stored, table, misses, into, slots)
        return
    raw.record_stream(torch.cuda.current_stream(raw.device))
    fetch(stored, table, misses, into, raw)
    is_new = torch.zeros_like(misses, dtype=torch.bool)
    # What is no miss falls behind the slots, and is cut off.
    is_new = torch.nn.functional.pad(is_new, (0, 1)).scatter_(2, into.masked_fill(into < 0, misses.shape[2]), True)
    decoded = layer.value_storage.decode(raw).to(slots.dtype)
    slots.copy_(torch.where(is_new[..., :-1, None, None], decoded, slots))
