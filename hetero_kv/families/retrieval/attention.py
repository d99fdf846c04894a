"""Retrieval attention: all tokens stay in DRAM, and the CPU attends to the best blocks in place.

KTransformers' sparse-attention framework divides a sequence into Initial | Context | Local. A token attends to all of
Initial and Local, and to the Context blocks whose representatives score best against its query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hetero_kv.adapter import bridge
from hetero_kv.adapter.decode_buffers import DecodeBuffers
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.cpu_ops import causal_attention
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.cpu_ops.window_step import sink_step
from hetero_kv.engine.statistics import BLOCK_RECALL, READ_BYTES
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.decoded_rows import GroupRows
from hetero_kv.families.retrieval.draft_attention import attend_natively, attend_sparsely
from hetero_kv.families.retrieval.footprint import PagedFootprint
from hetero_kv.families.retrieval.indexed_layer import ScoredLayer
from hetero_kv.families.retrieval.layer import RetrievalLayer, count_step
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.resident_layer import ResidentLayer
from hetero_kv.families.retrieval.settings import RETRIEVAL
from hetero_kv.families.retrieval.split_decode import SplitDecode
from hetero_kv.families.retrieval.statistics import ATTENDED_BLOCKS, CPU_BYTES, DRAM_BYTES, ESTIMATED_SHARE
from hetero_kv.gpu_ops.merge import apply_sink
from hetero_kv.settings.engine_settings import GPU
from hetero_kv.store.pool import BlockPool
from hetero_kv.weights.kernel_arrays import NAMES, kernel_array

#: Settings that do not affect what is stored (see `stored_by`).
_CHOOSING = frozenset(
    (
        "top_k_blocks", "group_reduce", "residual_attention", "rerank", "target_mass", "min_blocks", "max_dense_blocks",
        "group_factor", "attend_to",
    )
)  # fmt: skip


class RetrievalAttention(SplitDecode):
    """Prefills exactly, chunk by chunk; decodes over Initial, Local and the best `top_k_blocks` blocks.

    A budget that covers the Context gives full attention, to the storage type's precision. With `target_mass`,
    which may attend to fewer blocks, `min_blocks` or `max_dense_blocks` must cover it instead.
    """

    meaning = RETRIEVAL.meaning
    drafts_sparsely = True
    statistics = (BLOCK_RECALL, ESTIMATED_SHARE, ATTENDED_BLOCKS, READ_BYTES, DRAM_BYTES, CPU_BYTES)

    def new_cache_layer(self) -> RetrievalLayer:
        derived = Derived() if self.budget is None else Derived.of(self.settings)
        # Representatives that depend on received attention are computed at the prompt's end.
        vectors_of = self.vectors_of if self.budget is not None and not self.accumulates else None
        layer = RetrievalLayer(self._layout(), self.settings, derived, vectors_of)
        if self.resident_choice is not None:
            layer = ResidentLayer(self._layout(), self.settings, derived, vectors_of, self.resident_choice)
        elif self.scored_choice is not None:
            layer = ScoredLayer(self._layout(), self.settings, derived, vectors_of, self.scored_choice.blocks)
        layer.loads_past = self.settings.prefills_sparsely
        return layer

    # -- decode

    def decode_step(self, layer: RetrievalLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window is not None:
            self._refuse_window(call.sliding_window)
        blocks = layer.blocks_for(step, call.k, call.v)
        if step.draft_blocks is not None:
            return attend_sparsely(layer, step, step.draft_blocks, call, self.threads)
        if self._attends_on_gpu(layer, call):
            return self._attended_together([step], call)
        if layer.window is not None:
            return self._decode_with_window(layer, step, blocks, call)
        self._require_device(layer)
        dtype = torch.bfloat16 if call.q.dtype is torch.bfloat16 and call.sink is None else torch.float32
        native = self._native_of(layer, blocks, call, dtype)
        is_stored = not native.stores
        if is_stored:
            layer.store_token(step, call.k, call.v)
        if blocks.closes:
            self._finalize_blocks(layer, step)
        rows, heads = call.q.shape[:2]
        out = torch.empty((rows, heads, 1, native.v_dim), dtype=dtype)
        lse = np.empty((rows, heads // native.group, native.group), np.float32)
        q = kernel_array(call.q, dtype)
        k, v = (q, q) if is_stored else (kernel_array(call.k, dtype), kernel_array(call.v, dtype))
        array = kernel_array(out, dtype)
        group = GroupRows(layer, step, blocks, is_stored)
        counts = self._attend_natively(native, [group], q, k, v, call.scale, call.softcap or 0.0, array, lse)
        count_step([layer], counts)
        if call.sink is not None or self.engine.measure_recall:
            out, lse = self._completed(group, call, out, lse, lse if counts.masses is None else counts.masses[0])
        if layer.record is not None:
            attended = None if counts.masses is None else torch.from_numpy(counts.masses[0])
            self._record_token(layer, blocks, call, torch.from_numpy(lse), attended)
        if self.accumulates:
            seen = call.q.squeeze(2).to(torch.float32).contiguous().numpy()
            layer.remember(step.past, call.scale, call.softcap, seen, lse.reshape(rows, heads))
        return out if out.dtype is call.q.dtype else out.to(call.q.dtype)

    # The loops over steps call nothing: they run for every row, layer and token.
    def prepare_steps(self, steps: Sequence[Step], dtype: Any, softcap: float | None) -> list[RetrievalStep] | None:
        if self.accumulates or self.engine.measure_recall:
            return None
        index, bound_to, natives = self.layer_idx, (dtype, softcap is not None), []
        for step in steps:
            layer = step.group.layers[index]
            native = layer.token_step
            if (
                native is None
                # A guess chooses by no estimates.
                or (step.draft_blocks is not None and native.estimates)
                or not native.stores
                or native.bound_to != bound_to
                or layer.window is not None
                or layer.record is not None
            ):
                return None
            natives.append(native)
        return natives

    def takes_together(self, prepared: list[tuple[Step, Any]]) -> bool:
        if len(prepared) == 1:
            return True
        index = self.layer_idx
        first = prepared[0][0].group.layers[index]
        pool = first.pool
        # Blocks in files are requested for each group.
        if pool is None or pool.reads_ahead():
            return False
        # With a schedule, a selection is stored in each group.
        has_own = self._has_schedule
        for step, _ in prepared:
            layer = step.group.layers[index]
            if layer.pool is not pool or step.draft_blocks is not None:
                return False
            if step.is_draft and self._closes_drafted(step):
                return False
            has_own = has_own or layer.state.candidates is not None
        return not has_own or not any(self._chooses(first.layout.context_blocks(step.length)) for step, _ in prepared)

    def _closes_drafted(self, step: Step) -> bool:
        """Whether a step closes a block with drafted tokens, which are not stored yet if all steps are one call."""
        layout = step.group.layers[self.layer_idx].layout
        return step.blocks(layout).newly_finalized[1] * layout.block_size > step.group.length

    def attend_steps(
        self, prepared: list[tuple[Step, Any]], arrays: DecodeBuffers, scale: float, softcap: float, sink: np.ndarray,
        queue: KernelQueue,
    ) -> None:  # fmt: skip
        (first, native), groups, index = prepared[0], [], self.layer_idx
        if first.draft_blocks is not None:
            layer = first.group.layers[index]
            queue.run()
            lse = attend_natively(native, layer, first, first.draft_blocks, arrays, scale, softcap)
            self._add_sink(arrays, lse, sink, queue)
            return
        # Without a budget nothing is derived from a block.
        derives = self.budget is not None
        for step, _ in prepared:
            layer = step.group.layers[index]
            blocks = step.made.get(id(layer.layout)) or step.blocks(layer.layout)
            if derives and blocks.closes:
                if step.is_draft:
                    # Queued kernels may store tokens of these blocks.
                    queue.run()
                self._finalize_blocks(layer, step)
            groups.append(GroupRows(layer, step, blocks, False))
        q, k, v = arrays.q, arrays.k, arrays.v
        lse = np.empty((len(q), k.shape[1], native.group), np.float32)
        counts = self._attend_natively(native, groups, q, k, v, scale, softcap, arrays.attended, lse, queue=queue)
        self._add_sink(arrays, lse, sink, queue)
        count_step([group.layer for group in groups], counts)

    @staticmethod
    def _add_sink(arrays: DecodeBuffers, lse: np.ndarray, sink: np.ndarray, queue: KernelQueue) -> None:
        if sink.size:
            queue.add(sink_step(NAMES[arrays.attended.dtype]), arrays.attended, lse, sink)

    def _completed(
        self, group: GroupRows, call: bridge.AttentionCall, out: torch.Tensor, lse: np.ndarray, attended: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Apply the learned sink to out [batch, heads, 1, v_dim] and lse, and measure the coverage by `attended`.

        attended: the log-sum-exp of the attended tokens, in the shape of lse.
        """
        whole = torch.from_numpy(lse).view(out.shape[:3])
        if self.engine.measure_recall:
            self._measure_recall(group.layer, group.blocks, call, torch.from_numpy(attended))
        if call.sink is not None:
            out, whole = apply_sink(out, whole, call.sink)
        return out, whole.numpy()

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile the kernels of decoding and short turns, or load them from Numba's cache, before the first token."""
        settings, dims = self.settings, (kv_heads, self.settings.block_size, k_dim, v_dim)
        derived = Derived() if self.budget is None else Derived.of(settings)
        pool = BlockPool(
            1, *dims, settings.key_storage, settings.stored_representatives, False, *derived,
            value_storage=settings.value_storage, offset_keys=settings.offset_keys,
            representative_storage=settings.representative_kind(k_dim, v_dim),
        )  # fmt: skip
        causal_attention.compile_for(
            pool.key_array.dtype, pool.value_array.dtype, group, k_dim, v_dim, softcap > 0,
            offset=settings.offset_keys, in_bfloat16=self._own_config.dtype == torch.bfloat16,
        )  # fmt: skip
        self._bound_step(pool, np.ones(1, np.int32), group, softcap > 0, self._own_config.dtype, True)
        self.prompt_attention.compile(self._own_config.dtype, k_dim, v_dim, softcap)

    # -- descriptions for the engine

    @classmethod
    def registries(cls) -> Mapping[str, Mapping[str, str]]:
        return RETRIEVAL.registries()

    def settings_in_layer(self) -> dict[str, Any]:
        own: dict[str, Any] = {"top_k_blocks": "all" if self.budget is None else self.budget}
        if self.preselected is not None:
            own["preselect_block_count"] = self.preselected
        return super().settings_in_layer() | own

    def stored_by(self) -> dict[str, Any]:
        """See AttentionOperator: the number of attended blocks, and how they are chosen, may change."""
        idle = _CHOOSING | self.settings.idle_prefill_settings
        kept = {name: value for name, value in self.settings_in_layer().items() if name not in idle}
        derived = Derived() if self.budget is None else Derived.of(self.settings)
        kept |= {"is_scored": self.budget is not None, "derived": list(derived)}
        # Its window, and so its division into blocks, is another one.
        return kept | ({"attend_on": GPU} if self.has_whole_window else {})

    def choosing_queries(self, length: int, question: int | None) -> int:
        votes = self.preselected is not None and self._layout().context_blocks(length) > self.preselected
        return self.settings.observed(question) if votes else 0

    def footprint(self, shape: KVShape) -> PagedFootprint:
        derived = Derived() if self.budget is None else Derived.of(self.settings)
        watches = self.accumulates or self.preselected is not None
        observed = self.settings.observed(None) if watches else 0
        return PagedFootprint.of(
            shape, self.settings, self.accumulates, derived, observed=observed,
            resident=self.resident_choice or self.scored_choice, attends_on_cpu=self.resident_choice is None,
            has_whole_window=self.has_whole_window,
        )  # fmt: skip

    def require_recordable(self, *, in_prompt: bool) -> None:
        super().require_recordable(in_prompt=in_prompt)
        if self.settings.token_step > 1:
            raise HeteroKVError(
                f"{self.path}: token_step is {self.settings.token_step}, so that what a token attends to follows from "
                "earlier tokens, and cannot be computed again for one; use rules with token_step 1"
            )

    def attended_tokens(self, length: int) -> float:
        """See AttentionOperator: with `target_mass`, the most that a step may attend to."""
        layout = RetrievalLayout.of_settings(self.settings)
        is_covered = self.covering is None or layout.context_blocks(length) <= self.covering
        return layout.attended_tokens(length, None if is_covered else self.budget)
