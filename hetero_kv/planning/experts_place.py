"""Where `experts_device: auto` puts the experts of a mixture: on the GPU if everything fits there, else in DRAM."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero_kv.planning.footprint import Footprint
from hetero_kv.planning.plan import Plan
from hetero_kv.planning.planned import Planned
from hetero_kv.settings.engine_settings import AUTO, DRAM, GPU
from hetero_kv.weights.experts_form import experts_in


def experts_place(
    injection: Planned, dtype: torch.dtype, stored: Mapping[str, str] | None, dram: int, gpu: int | None
) -> str:
    """The setting `experts_device` as it is in force: the first place with which a context fits.

    A context has `max_seq_len` tokens, or the model's context length if that is auto. If it fits with neither place,
    the result is `auto`, which decides by the weights alone (`placing.experts_offload_to_dram`).

    Args:
        injection: a model on the meta device with its rules.
        dtype, stored: see `Footprint.of`.
        dram, gpu: free memory before the model is loaded, bytes; `gpu` is None if unknown.
    """
    engine, length = injection.engine, injection.context_length
    is_open = engine.experts_device == engine.weights_device == AUTO
    if not is_open or gpu is None or not any(True for _ in experts_in(injection.model)):
        return engine.experts_device
    tokens = engine.max_seq_len if isinstance(engine.max_seq_len, int) else length
    for place in (GPU, DRAM):
        footprint = Footprint.of(injection, dtype=dtype, on_gpu=True, stored=stored, gpu=gpu, experts_device=place)
        # Layers that do not fit on the GPU would be streamed.
        is_streamed = place == GPU and footprint.weights_in_dram > 0
        if not is_streamed and Plan(footprint, dram, gpu, length, budget=engine.dram_budget).fits(tokens):
            return place
    return AUTO
