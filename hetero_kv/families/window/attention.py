"""The model's own attention to near tokens: a sliding window (Gemma, gpt-oss, …), or a chunk of the text (Llama 4).

Only these tokens are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge
from hetero_kv.adapter.decode_buffers import DecodeBuffers
from hetero_kv.adapter.footprint import WindowFootprint
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.cpu_ops.kernel_queue import KernelQueue, prepare_queued
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.cpu_ops.window_step import window_region, window_step
from hetero_kv.engine.checkpoint import LayerCheckpoint
from hetero_kv.engine.recorded_prompt import RecordedPrompt
from hetero_kv.engine.statistics import READ_BYTES, Tally
from hetero_kv.engine.step import Step
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.families.window.layer import WindowLayer
from hetero_kv.families.window.settings import SLIDING_WINDOW
from hetero_kv.gpu_ops.attention import sliding_window_attention
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, NAMES, bits


class SlidingWindowAttention(AttentionOperator):
    """Exact attention of a layer whose queries see the last `sliding_window` keys; older keys are dropped.

    In layers of the type `chunked_attention`, a query sees only those of the last `attention_chunk_size` keys that are
    in its own chunk of the text: positions n·size to (n + 1)·size - 1.
    """

    meaning, settings_class = SLIDING_WINDOW.meaning, SLIDING_WINDOW.settings_class
    statistics = (READ_BYTES,)
    prefills_exactly = True
    continues_exactly = True
    records_attention = True
    decodes_drafts = True
    drafts_sparsely = True

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        super().require_suitable(path, module)
        if attention_module.layer_window(module) is None:
            raise UnsupportedModelError(
                f"{path} ({type(module).__name__}) has full attention in this model, not a sliding window; "
                "use RetrievalAttention there"
            )

    def new_cache_layer(self) -> WindowLayer:
        return WindowLayer(self.window)

    def load_prefill(self, layer: WindowLayer, step: Step, recorded: RecordedPrompt) -> None:
        # No copy: the layer never overwrites these tokens.
        layer.rollback((recorded.keys, recorded.values, 0, recorded.keys.shape[2], recorded.length, Tally()))

    def prefill_chunk(self, layer: WindowLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window not in (None, layer.window):
            raise UnsupportedModelError(
                f"{self.path}: the model requests a window of {call.sliding_window}, but its config has {layer.window}"
            )
        if not attention_module.is_chunked(self.wrapped):
            return self._attend(layer, step, call.q, layer.extend(call.k, call.v), call)
        size, tokens = layer.window, call.q.shape[2]
        edges = [0, *range(size - layer.get_seq_length() % size, tokens, size), tokens]
        return torch.cat([self._attend_chunk(layer, step, call, slice(*part)) for part in pairwise(edges)], dim=2)

    def _attend_chunk(self, layer: WindowLayer, step: Step, call: bridge.AttentionCall, part: slice) -> torch.Tensor:
        """The attention of the tokens `part` of a call, which are of one chunk of the text."""
        keys, values = layer.extend(call.k[:, :, part], call.v[:, :, part])
        chunk = slice(keys.shape[2] - 1 - (layer.get_seq_length() - 1) % layer.window, None)
        return self._attend(layer, step, call.q[:, :, part], (keys[:, :, chunk], values[:, :, chunk]), call)

    def _attend(
        self,
        layer: WindowLayer,
        step: Step,
        q: torch.Tensor,
        cached: tuple[torch.Tensor, torch.Tensor],
        call: bridge.AttentionCall,
    ) -> torch.Tensor:
        """The attention of queries to the last keys and values, which end with the queries' own."""
        keys, values = cached
        if step.is_decode:
            layer.read = layer.read.plus(keys[0].nbytes + values[0].nbytes)
        out, total = sliding_window_attention(q, keys, values, layer.window, call.scale, call.softcap, call.sink)
        if layer.record is not None:
            positions = torch.arange(layer.get_seq_length() - keys.shape[2], layer.get_seq_length())
            layer.record.add_keys(q, keys[0], positions, call.scale, call.softcap)
            layer.record.complete(total, sink=call.sink)
        return out

    def decode_step(self, layer: WindowLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        return self.prefill_chunk(layer, step, call)

    def prepare_steps(self, steps: Sequence[Step], dtype: Any, softcap: float | None) -> list[WindowLayer] | None:
        layers: list[WindowLayer] = [step.group.layers[self.layer_idx] for step in steps]
        return layers if all(layer.record is None and layer.holds(dtype) for layer in layers) else None

    def takes_together(self, prepared: list[tuple[Step, Any]]) -> bool:
        return True

    def attend_steps(
        self, prepared: list[tuple[Step, Any]], arrays: DecodeBuffers, scale: float, softcap: float, sink: np.ndarray,
        queue: KernelQueue,
    ) -> None:  # fmt: skip
        threads = at_most(torch.get_num_threads())
        for step, layer in prepared:
            own = arrays.of_rows(step.rows)
            if not layer.has_room(1):
                # Queued kernels may still have to write tokens of this buffer, which is copied now.
                queue.run()
            seen = layer.make_room(*own.new)
            start = seen.start
            if attention_module.is_chunked(self.wrapped):
                start = seen.stop - 1 - (layer.get_seq_length() - 1) % layer.window
            keys, values = bits(layer.keys), bits(layer.values)
            group, dtype = own.q.shape[1] // keys.shape[1], NAMES[keys.dtype]
            region = window_region(dtype, group, keys.shape[3], values.shape[3])
            queue.add(
                window_step(dtype), all_threads(), region, own.q, own.k, own.v, keys, values, start, seen.stop, scale,
                softcap, sink, own.attended, threads,
            )  # fmt: skip
            layer.read = layer.read.plus((seen.stop - start) * (keys[0, :, 0].nbytes + values[0, :, 0].nbytes))
            if step.is_draft:
                step.states[self.layer_idx] = LayerCheckpoint(layer.snapshot(), 0)

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        dtype = ARRAY_DTYPES.get(self._own_config.dtype)
        if dtype is not None:
            name = NAMES[np.dtype(dtype)]
            window_region(name, group, k_dim, v_dim)
            prepare_queued(window_step(name))

    # -- descriptions for the engine

    @property
    def window(self) -> int:
        """Keys that a query sees, itself included."""
        window = attention_module.layer_window(self.wrapped)
        assert window is not None
        return window

    def footprint(self, shape: KVShape) -> WindowFootprint:
        return WindowFootprint(shape, sliding_window=self.window)

    def attended_tokens(self, length: int) -> float:
        return min(self.window, length)
