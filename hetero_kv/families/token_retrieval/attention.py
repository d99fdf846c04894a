"""Token retrieval: KV is in DRAM blocks; decode attends to sink, window and single tokens of the Context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.cpu_ops import causal_attention
from hetero_kv.cpu_ops.token_store import store_token, stores
from hetero_kv.engine.statistics import BLOCK_RECALL, READ_BYTES
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.device_context import DeviceChoice
from hetero_kv.families.retrieval.footprint import PagedFootprint
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.recall import covered_mass
from hetero_kv.families.retrieval.recording import add_blocks, add_window, around_context
from hetero_kv.families.retrieval.resident_attention import ResidentAttention
from hetero_kv.families.retrieval.resident_context import ResidentChoice
from hetero_kv.families.retrieval.statistics import DRAM_BYTES, ESTIMATED_SHARE
from hetero_kv.families.sparse_prefill.attention import PromptAttention
from hetero_kv.families.token_retrieval import choosers
from hetero_kv.families.token_retrieval.choosers import TokenSettings
from hetero_kv.families.token_retrieval.choosers.chooser import NOTHING_LEARNED, ChosenTokens, TokenQuery
from hetero_kv.families.token_retrieval.choosers.chooser_settings import TOKEN_RETRIEVAL
from hetero_kv.families.token_retrieval.clustered_context import ClusterChoice, ClusteredContext
from hetero_kv.families.token_retrieval.decode import NO_LSE, TokenDecode
from hetero_kv.families.token_retrieval.footprint import ClusteredFootprint
from hetero_kv.families.token_retrieval.layer import TokenLayout, TokenRetrievalLayer
from hetero_kv.families.token_retrieval.look_ahead import LookAhead, link
from hetero_kv.families.token_retrieval.resident_layer import ResidentTokenLayer
from hetero_kv.families.token_retrieval.statistics import ATTENDED_TOKENS
from hetero_kv.gpu_ops.host_copies import on_host
from hetero_kv.gpu_ops.merge import apply_sink
from hetero_kv.settings.engine_settings import GPU, SPLIT, EngineSettings
from hetero_kv.store.pool import BlockPool


class TokenRetrievalAttention(ResidentAttention):
    """Decodes over Initial, Local and the Context tokens that a chooser takes per kv head.

    Prefill is exact unless a sparse prefill is set. With a budget that covers the Context the result is full attention,
    to the storage type's precision.
    """

    meaning, settings_class = TOKEN_RETRIEVAL.meaning, TOKEN_RETRIEVAL.settings_class
    chosen_by = TOKEN_RETRIEVAL.chosen_by
    statistics = (BLOCK_RECALL, ESTIMATED_SHARE, ATTENDED_TOKENS, READ_BYTES, DRAM_BYTES)

    decodes_drafts = True

    settings: TokenSettings

    def __init__(self, path: str, wrapped: nn.Module, settings: TokenSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        if engine.attend_on in (GPU, SPLIT) and (part := self.gpu_obstacle) is not None:
            raise HeteroKVError(f"{path}: attend_on is {engine.attend_on}, but {part}; set attend_on to cpu")
        if engine.attend_on == SPLIT:
            raise HeteroKVError(
                f"{path}: attend_on is split, but a chooser takes single tokens, of which the CPU takes no list from a "
                "GPU; set attend_on to gpu or cpu"
            )
        if engine.index_device == GPU and engine.attend_on != GPU:
            part = self.gpu_obstacle or "a chooser takes tokens where they are attended to (attend_on: gpu has both)"
            raise HeteroKVError(f"{path}: index_device is gpu, but {part}; set index_device to auto")
        registered = choosers.get(settings.chooser)
        if type(settings) is not registered.settings:
            raise HeteroKVError(
                f"{path}: chooser {settings.chooser} has the settings {registered.settings.__name__}, not "
                f"{type(settings).__name__}"
            )
        is_dense = self.layer_idx < settings.dense_layer_num
        self.chooser = None if is_dense else registered.implementation(settings, self.layer_idx)
        if self.chooser is not None:
            self.chooser.require_suitable(path, KVShape.of_attention(wrapped, self._own_config))
        self.prompt_attention = PromptAttention(self, settings)
        if settings.prefills_sparsely:
            self.prefills_exactly = self.continues_exactly = False
        #: The look-ahead that chooses for this layer, and the one that chooses for the next layer from this one's
        #: input.
        self.ahead: LookAhead | None = None
        self.following: LookAhead | None = None
        self._decode = TokenDecode(self)
        #: How the GPU chooses; None where the CPU attends.
        self.resident_choice: DeviceChoice | None = None
        self.attend_on(engine.attend_on)

    @property
    def gpu_obstacle(self) -> str | None:
        part = choosers.get(self.settings.chooser).implementation.gpu_obstacle(self.settings)
        if part is None and self.engine.measure_recall:
            return "measure_recall compares with attention to all blocks, which the CPU computes"
        return part

    def attend_on(self, place: str) -> None:
        super().attend_on(place)
        self.resident_choice = self._choice_of_the_gpu() if place == GPU else None

    def _choice_of_the_gpu(self) -> DeviceChoice:
        if self.chooser is None:
            # The GPU has all tokens.
            return ResidentChoice(0, bounds=False, largest=False, is_shared=False)
        return self.chooser.on_gpu(TokenLayout.of_settings(self.settings).sink_blocks)

    @property
    def indexes_on_gpu(self) -> bool:
        return self.resident_choice is not None and self.chooser is not None

    @property
    def has_whole_window(self) -> bool:
        """Whether the GPU has the keys and values of all tokens, because the layer attends to all of them."""
        return self.resident_choice is not None and self.chooser is None

    @classmethod
    def settings_class_for(cls, kwargs: Mapping[Any, Any]) -> type[TokenSettings]:
        """See Operator: the settings of the chooser that `kwargs` names."""
        return TOKEN_RETRIEVAL.settings_class_for(kwargs)

    def new_cache_layer(self) -> TokenRetrievalLayer:
        layer = TokenRetrievalLayer(self.settings, self.chooser)
        if self.resident_choice is not None:
            layer = ResidentTokenLayer(self.settings, self.chooser, self.resident_choice)
        layer.loads_past = self.settings.prefills_sparsely
        return layer

    # -- prompts

    @property
    def observed_queries(self) -> int:
        return 0 if self.chooser is None else self.chooser.observed_queries

    def attend_chunk(
        self, step: Step, call: bridge.AttentionCall, past_k: torch.Tensor, past_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.prompt_attention(step, call, past_k, past_v)

    def _new_observation(self, step: Step) -> Observation | None:
        return Observation(self.observed_queries) if self.observed_queries else None

    def _finalize_blocks(self, layer: TokenRetrievalLayer, step: Step) -> None:
        observation = layer.state.observation
        if observation is None or observation.q is None:
            layer.finalize(step)
            return
        layer.state = replace(layer.state, observation=None)
        layer.finalize(step, *on_host(observation.q.float()))

    # -- look-ahead

    @classmethod
    def configure_together(cls, operators: Sequence[AttentionOperator]) -> None:
        link(operators, cls)

    def arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Choose the next layer's tokens from this layer's arguments; see AttentionOperator."""
        if self.following is not None:
            self.following.choose(args, kwargs)
        return kwargs

    def chooses_in(self, step: Step) -> bool:
        """Whether a step of one token per row must choose Context tokens, as known before the token is stored."""
        layer = step.group.layers[self.layer_idx]
        if not step.is_decode or not step.stores or layer.pool is None or self.chooser is None:
            return False
        blocks = step.blocks(layer.layout)
        tokens = (blocks.finalized - min(layer.layout.sink_blocks, blocks.finalized)) * layer.layout.block_size
        return tokens > 0 and not self.chooser.covers(tokens)

    def chosen_for(self, step: Step, call: bridge.AttentionCall) -> ChosenTokens:
        """The chooser's choice for a coming step with guessed queries; finalizes the blocks that the step completes.

        Blocks of the choice that are in a file are requested from the system.
        """
        return self._decode.chosen_for(step.group.layers[self.layer_idx], step, call)

    # -- decode

    def decode_step(self, layer: TokenRetrievalLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window is not None:
            self._refuse_window(call.sliding_window)
        blocks = layer.blocks_for(step, call.k, call.v)
        if self._attends_on_gpu(layer, call):
            return self._attended_together([step], call)
        shares = layer.state.share
        out, lse, mass = self._decode(layer, step, blocks, call)
        if self.engine.measure_recall:
            assert layer.pool is not None
            covered = covered_mass(layer.pool, blocks, call, mass, self.threads)
            layer.state = replace(layer.state, recall=layer.state.recall.plus(covered))
        if call.sink is not None:
            out, lse = apply_sink(out, lse, call.sink)
        if layer.record is not None:
            # A chooser that estimates unattended tokens sets a share.
            self._record_token(layer, blocks, call, lse, None if layer.state.share is shares else mass)
        return out if out.dtype is call.q.dtype else out.to(call.q.dtype)

    def _record_token(
        self, layer: TokenRetrievalLayer, blocks: StepBlocks, call: bridge.AttentionCall, total: torch.Tensor,
        attended: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Complete the layer's record, to which `TokenQuery.attend` has added single tokens, if there was a choice."""
        record, layout = layer.record, layer.layout
        assert record is not None
        tokens = (blocks.finalized - min(layout.sink_blocks, blocks.finalized)) * layout.block_size
        of_context = torch.full((1, tokens), record.is_empty)
        add_blocks(layer, blocks, call, around_context(layer, blocks, of_context))
        add_window(layer, call)
        record.complete(total, attended, call.sink)

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile the kernels of decode and short turns, or load them from Numba's cache, before a token needs them."""
        settings, shape = self.settings, KVShape(kv_heads, k_dim, v_dim)
        dims = kv_heads, settings.block_size, k_dim, v_dim
        pool = BlockPool(
            3, *dims, settings.key_storage, 0, value_storage=settings.value_storage, offset_keys=settings.offset_keys,
            auxiliary=None if self.chooser is None else self.chooser.arrays(shape),
        )  # fmt: skip
        table, lengths = np.arange(3, dtype=np.int32)[None], np.full(3, settings.block_size, np.int32)
        q = np.ones((1, kv_heads, group, k_dim), np.float32)
        causal_attention.compile_for(
            pool.key_array.dtype, pool.value_array.dtype, group, k_dim, v_dim, softcap > 0,
            offset=settings.offset_keys, in_bfloat16=self._own_config.dtype == torch.bfloat16,
        )  # fmt: skip
        if stores(pool.key_array.dtype) and stores(pool.value_array.dtype) and not settings.offset_keys:
            k, v = (np.ones((1, kv_heads, dim), np.float32) for dim in (k_dim, v_dim))
            store_token(k, v, pool.key_array, pool.value_array, table, 0)
        known = NOTHING_LEARNED if self.chooser is None else self.chooser.finalize(pool, table, 1, 2, NOTHING_LEARNED)
        query = TokenQuery(q, pool, table, 1, 2, lengths, 1.0, softcap, NO_LSE, known, self.threads)
        _, lse = query.attend_blocks(query.other_blocks)
        if self.chooser is not None:
            self.chooser.attend(query._replace(outside_lse=lse))
        self.prompt_attention.compile(self._own_config.dtype, k_dim, v_dim, softcap)

    # -- description

    @classmethod
    def registries(cls) -> Mapping[str, Mapping[str, str]]:
        return TOKEN_RETRIEVAL.registries()

    def stored_by(self) -> dict[str, Any]:
        """Settings that determine what is stored per block; see AttentionOperator."""
        idle = self.settings.idle_prefill_settings | (frozenset() if self.chooser is None else self.chooser.choosing)
        kept = {name: value for name, value in self.settings_in_layer().items() if name not in idle}
        kept |= {"is_chosen": self.chooser is not None}
        # Its window, and so its division into blocks, is another one.
        return kept | ({"attend_on": GPU} if self.has_whole_window else {})

    def footprint(self, shape: KVShape) -> PagedFootprint:
        arrays = {} if self.chooser is None else self.chooser.arrays(shape)
        footprint = ClusteredFootprint.of(
            shape, self.settings, accumulates=False, auxiliary_bytes=sum(array.nbytes for array in arrays.values()),
            resident=self.resident_choice, has_whole_window=self.has_whole_window,
        )  # fmt: skip
        if not isinstance(self.resident_choice, ClusterChoice):
            return footprint
        indexed = shape.kv_heads * sum(arrays[name].nbytes for name in ClusteredContext.indexed)
        return replace(footprint, clusters=self.resident_choice, index_bytes=indexed)

    def attended_tokens(self, length: int) -> float:
        layout = TokenLayout.of_settings(self.settings)
        tokens = layout.context_blocks(length) * layout.block_size
        if self.chooser is None or self.chooser.covers(tokens):
            return length
        return length - tokens + self.chooser.attended_tokens(tokens)
