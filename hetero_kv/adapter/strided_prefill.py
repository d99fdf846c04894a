"""Strided prefill, and the work of cache layers after a part has passed all layers.

Layer-outer prefill walks from layer to layer with the whole prompt. Strided policies need the other order (Cascading KV
cache, arXiv:2406.17808, algorithm 1): a stride passes through all layers, entries are evicted, and the next stride
follows. A forward with such layers is therefore cut into parts, each of which is a forward like any other. Other
operators prefill each part, even a single token, after the earlier parts. Their work on the prompt as a whole
(RetrievalAttention's observation of its last queries, ShadowKV's factors) is done with the last part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import ModelOutput

from hetero_kv.adapter.model_call import ModelCall, joined_tokens
from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.gpu_ops.host_copies import on_device


class StridedForward:
    """A forward of one group that is cut into parts, and its present part.

    Attributes:
        cache: the cache of the call.
        group: the group of the tokens.
        has_head: whether it is the whole model's forward, with logits, or that of the module that walks through layers.
        hidden: the latest output of the module that walks through layers.
        replayed: a part of `hidden` that this module returns again, for a head that computes logits of it.
        call: of the part.
        output: of the part.
    """

    def __init__(self, cache: HeteroCache, group: EqualLengthGroup, has_head: bool) -> None:
        self.cache = cache
        self.group = group
        self.has_head = has_head
        self.hidden: Any = None
        self.replayed: Any = None
        self.output: Any = None
        self.call: ModelCall

    @property
    def tokens(self) -> int:
        """Tokens of the part."""
        return self.call.shape[1]

    @property
    def token_ids(self) -> torch.Tensor | None:
        """[rows, tokens] of the part; None where the model was called with embeddings."""
        return self.call.token_ids

    def logits(self, tile: slice) -> torch.Tensor:
        """Logits [rows, tile, vocab] float32 of tokens that have passed.

        Taken from the output if it has them all, as for a decoded token; else the model's head computes them from the
        last hidden states.
        """
        assert self.token_ids is not None
        logits = self.output.get("logits") if isinstance(self.output, ModelOutput) else None
        if logits is not None and logits.shape[1] == self.tokens:
            return logits[:, tile].float()
        self.replayed = replace(self.hidden, last_hidden_state=self.hidden.last_hidden_state[:, tile])
        try:
            return self.call.for_tokens(self.token_ids[:, tile], all_logits=True).run().logits.float()
        finally:
            self.replayed = None

    def run_transient(self, token_ids: Sequence[int], lasting: Sequence[FamilyLayer]) -> None:
        """Pass these tokens, appended to every row, through the layers; only the layers in `lasting` keep their effect.

        Layers that keep the whole sequence store nothing, so that the tokens need no room in them.
        """
        assert self.token_ids is not None
        rows, count = self.token_ids.shape[0], len(token_ids)
        passed = on_device(torch.tensor(token_ids), self.token_ids.device).expand(rows, -1)
        kept = {id(layer) for layer in lasting}
        others = [(layer, _snapshot(layer)) for layer in self.group.layers if id(layer) not in kept]
        with self.cache.transient(), self.cache.prompt_part(0, count, count):
            try:
                self.call.for_tokens(passed, all_logits=False).run()
            finally:
                for layer, state in others:
                    _rollback(layer, state)


def _snapshot(layer: Any) -> Any:
    return layer.snapshot() if isinstance(layer, FamilyLayer) else hf_cache_layers.snapshot(layer)


def _rollback(layer: Any, state: Any) -> None:
    if isinstance(layer, FamilyLayer):
        layer.rollback(state)
    else:
        hf_cache_layers.rollback(layer, state)


def run_strided(call: ModelCall, cache: HeteroCache, group: EqualLengthGroup, *, has_head: bool) -> Any:
    """The output of a call for the rows of one group, computed in strides.

    Args:
        has_head: whether the output has logits.

    Raises UnsupportedModelError for an argument that cannot be cut.
    """
    layers = group.strided_layers
    total = call.shape[1]
    for layer in layers:
        layer.begin_turn(total)
    strided = StridedForward(cache, group, has_head)
    cache.strided = strided
    try:
        # Policies may read the logits of any token.
        with cache.requesting(logits_to_keep=0):
            outputs = list(_parts_run(strided, call, layers))
        return outputs[0] if len(outputs) == 1 else joined_tokens(outputs)
    finally:
        cache.strided = None


def _parts_run(strided: StridedForward, call: ModelCall, layers: Sequence[FamilyLayer]) -> Iterator[Any]:
    """Run the call in strides. Yields the output of each."""
    start, total = 0, call.shape[1]
    while start < total:
        stop = min(total, start + _stride(layers, total))
        is_whole = stop - start == total
        strided.call = call if is_whole else call.part(slice(start, stop))
        with nullcontext() if is_whole else strided.cache.prompt_part(start, stop, total):
            strided.output = strided.call.run()
        _after_all_layers(strided, layers)
        yield strided.output
        start = stop


def _stride(layers: Sequence[FamilyLayer], total: int) -> int:
    """Number of tokens of the next stride: as many as all layers have room for, at least one."""
    strides = [stride for layer in layers if (stride := layer.stride) is not None]
    return max(1, min([total, *strides]))


@torch.no_grad()
def _after_all_layers(strided: StridedForward, layers: Sequence[FamilyLayer]) -> None:
    """Run the hooks that wait until the part has passed all layers."""
    together: dict[Any, list[FamilyLayer]] = {}
    for layer in layers:
        if layer.after_all_layers is not None:
            together.setdefault(layer.after_all_layers, []).append(layer)
    for hook, members in together.items():
        hook(members, strided)
