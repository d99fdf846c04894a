"""A forward of a model with bounded layers: in strides where they ask for it, with what policies need besides.

Layer-outer prefill walks from layer to layer with the whole prompt. Strided policies need the other order (Cascading KV
cache, arXiv:2406.17808, algorithm 1): a stride passes through all layers, entries are dropped, the next stride comes.
So the outermost forward that is called with a HeteroCache is cut up here, and each part is a forward like any other.
Other operators prefill it, be it a single token, behind the parts before; what follows a prompt as a whole
(RetrievalAttention's look at its last queries, ShadowKV's factors) comes with its last part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import ModelOutput

from hetero_kv.adapter.bridge import UnsupportedModelError
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.checkpoints import transient
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.bounded.eviction import EvictionPolicy
from hetero_kv.families.bounded.layer import BoundedLayer

# Tokens whose logits are computed at once: a vocabulary is large.
_LOGITS_AT_ONCE = 256
_TOKEN_DIM = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "cache_position": -1}
_OUTPUTS = ("logits", "last_hidden_state")


@dataclass
class Drive:
    """The forward that is being driven.

    Attributes:
        cache: the one that it was called with.
        has_head: whether it is the whole model's, which gives logits, or that of the module that walks through layers.
        hidden: what the layers gave last, in the output of the module that walks through them.
        replayed: a part of it that this module is to give again, to a head that turns it into logits.
        output: of the forward's last part.
    """

    cache: HeteroCache
    has_head: bool
    hidden: Any = None
    replayed: Any = None
    output: Any = None


_drive: ContextVar[Drive | None] = ContextVar("hetero_kv_drive", default=None)


def driving(cache: HeteroCache) -> Drive | None:
    """The drive that this cache is in, if any."""
    drive = _drive.get()
    return drive if drive is not None and drive.cache is cache else None


@dataclass(frozen=True)
class _Call:
    """A model's forward and its arguments by name."""

    forward: Callable[..., Any]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        names = list(inspect.signature(forward).parameters)
        return cls(forward, {**dict(zip(names, args, strict=False)), **kwargs})

    @property
    def token_ids(self) -> torch.Tensor | None:
        return self.arguments.get("input_ids")

    @property
    def shape(self) -> tuple[int, int]:
        """(sequences, tokens)."""
        given = self.arguments.get("inputs_embeds") if self.token_ids is None else self.token_ids
        if not isinstance(given, torch.Tensor):
            raise HeteroKVError("the model was called with a HeteroCache and neither input_ids nor inputs_embeds")
        return given.shape[0], given.shape[1]

    def run(self) -> Any:
        return self.forward(**self.arguments)

    def part(self, chunk: slice) -> _Call:
        """The call for a part of the tokens, with as many of the logits as the whole call asked for."""
        total = self.shape[1]
        cut = dict(self.arguments)
        for name, value in self.arguments.items():
            if name in _TOKEN_DIM and isinstance(value, torch.Tensor):
                dim = _TOKEN_DIM[name] % value.dim()
                cut[name] = (
                    value if value.shape[dim] != total else value.narrow(dim, chunk.start, chunk.stop - chunk.start)
                )
            elif name == "attention_mask" and isinstance(value, torch.Tensor):
                cut[name] = value[..., : value.shape[-1] - (total - chunk.stop)]
            elif name == "logits_to_keep":
                cut[name] = _logits_of_part(value, chunk, total)
            elif isinstance(value, torch.Tensor):
                raise UnsupportedModelError(
                    f"the model is given {name}, a tensor of shape {list(value.shape)}, and a prompt that passes in "
                    f"strides; BoundedAttention cuts {', '.join(_TOKEN_DIM)} and attention_mask, and knows no others"
                )
        return replace(self, arguments=cut)

    def for_tokens(self, token_ids: torch.Tensor, all_logits: bool) -> _Call:
        """A call for other tokens, behind those that the cache knows."""
        dropped = ("inputs_embeds", "position_ids", "cache_position", "attention_mask")
        kept = {name: value for name, value in self.arguments.items() if name not in dropped}
        kept["input_ids"] = token_ids
        kept["return_dict"] = True
        if "logits_to_keep" in inspect.signature(self.forward).parameters:
            kept["logits_to_keep"] = 0 if all_logits else 1
        return replace(self, arguments=kept)


def call_shape(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """(sequences, tokens) of a model's call. Raises HeteroKVError when it is given no tokens."""
    return _Call.of(forward, args, kwargs).shape


def _logits_of_part(wanted: Any, chunk: slice, total: int) -> Any:
    """What of a part's logits is among those `wanted`: a number of last tokens (0: all), or indices."""
    if isinstance(wanted, torch.Tensor):
        places = torch.where(wanted < 0, wanted + total, wanted)
        if (places.diff() <= 0).any():
            raise UnsupportedModelError(
                f"logits_to_keep is {wanted.tolist()}, and the prompt passes in strides; give rising indices, or a "
                "number of last tokens"
            )
        return places[(places >= chunk.start) & (places < chunk.stop)] - chunk.start
    if not wanted:
        return wanted
    first = max(chunk.start, total - wanted)
    return torch.arange(first - chunk.start, max(first, chunk.stop) - chunk.start)


def driven(
    forward: Callable[..., Any],
    cache: HeteroCache,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_head: bool,
) -> Any:
    """The output of `forward`, whose tokens passed in strides, with entries dropped as policies say.

    `has_head` says whether it gives logits.

    Raises:
        HeteroKVError: a policy needs logits and `forward` gives none, or a catalyst and there is no tokenizer.
        UnsupportedModelError: an argument that cannot be cut into strides.
    """
    call = _Call.of(forward, args, kwargs)
    batch, total = call.shape
    cache.require_room(batch, total)
    for layer in cache.bounded_layers:
        layer.require_batch(batch)
        layer.begin(total)
    drive = Drive(cache, has_head)
    token = _drive.set(drive)
    try:
        outputs = []
        start = 0
        while start < total:
            stop = min(total, start + _stride(cache.bounded_layers, total))
            whole = stop - start == total
            part = call if whole else call.part(slice(start, stop))
            with nullcontext() if whole else cache.passing(start, stop, total):
                outputs.append(part.run())
            drive.output = outputs[-1]
            _settle(drive, part, stop - start)
            start = stop
        return outputs[0] if len(outputs) == 1 else _merged(outputs)
    finally:
        _drive.reset(token)


def _stride(layers: Sequence[BoundedLayer], total: int) -> int:
    """Tokens that may pass next: what all layers have room for, one at least."""
    strides = [stride for layer in layers if (stride := layer.stride) is not None]
    return max(1, min([total, *strides]))


def _merged(outputs: list[Any]) -> Any:
    """One output of many parts: that of the last, with the tokens of all."""
    last = outputs[-1]
    if not isinstance(last, ModelOutput):
        raise HeteroKVError(
            "return_dict=False was asked for, and the prompt passed in strides; read the output's names"
        )
    joined = {
        name: torch.cat([output[name] for output in outputs], dim=1)
        for name in _OUTPUTS
        if isinstance(last.get(name), torch.Tensor)
    }
    return replace(last, **joined)


# -- what policies need when a part has passed through all layers


@torch.no_grad()
def _settle(drive: Drive, call: _Call, tokens: int) -> None:
    """Let the policies drop entries that had to wait for the last layer."""
    late = [layer for layer in drive.cache.bounded_layers if layer.policy.settles_late]
    if not late:
        return
    for policy, layers in _by_policy(late):
        if policy.needs_logits:
            _score_tokens(drive, call, policy, layers)
    for policy, layers in _by_policy(late):
        if policy.allocates and tokens > 1:
            held = [layer.entries for layer in layers if layer.entries is not None]
            budgets = [layer.policy.budget_for(layer.prompt_length) for layer in layers]
            for layer, budget in zip(layers, policy.allocate(held, budgets), strict=True):
                layer.budget = budget
        due = [layer for layer in layers if layer.is_due]
        text = policy.catalyst_text()
        if due and text is not None:
            _run_catalyst(drive, call, text, due)
        for layer in layers:
            layer.settle(tokens)


def _by_policy(layers: list[BoundedLayer]) -> list[tuple[EvictionPolicy, list[BoundedLayer]]]:
    """Layers of the same policy with the same settings, together."""
    groups: dict[Any, list[BoundedLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.policy.settings, []).append(layer)
    return [(members[0].policy, members) for members in groups.values()]


def _score_tokens(drive: Drive, call: _Call, policy: EvictionPolicy, layers: list[BoundedLayer]) -> None:
    """Give the newest tokens the scores that the policy makes of their logits, a tile of tokens at a time."""
    tokens = call.token_ids
    if tokens is None:
        raise HeteroKVError(
            f"policy {policy.settings.policy} scores tokens by their logits, and the model was called with "
            "inputs_embeds; call it with input_ids"
        )
    if not drive.has_head:
        raise HeteroKVError(
            f"policy {policy.settings.policy} needs the model's logits, and the decoder was called without its head; "
            "call the whole model: model(input_ids, past_key_values=cache)"
        )
    entries = layers[0].entries
    assert entries is not None
    before: torch.Tensor | None = entries.carried.get("last_logits")
    scores = []
    for start in range(0, tokens.shape[1], _LOGITS_AT_ONCE):
        tile = slice(start, min(start + _LOGITS_AT_ONCE, tokens.shape[1]))
        logits = _logits(drive, call, tile)
        if before is None:
            first = torch.full((len(tokens), 1), float("inf"), device=logits.device)
            rest = logits[:, :-1], tokens[:, tile][:, 1:]
            scores += [first, policy.token_scores(*rest)] if rest[1].shape[1] else [first]
        else:
            scores.append(policy.token_scores(torch.cat([before[:, None], logits[:, :-1]], dim=1), tokens[:, tile]))
        before = logits[:, -1].clone()
    joined = torch.cat([score.float() for score in scores], dim=1)
    for layer in layers:
        layer.score_tokens(joined)
        assert layer.entries is not None
        layer.entries = layer.entries.carrying(last_logits=before)


def _logits(drive: Drive, call: _Call, tile: slice) -> torch.Tensor:
    """Logits [batch, tile, vocab] float32 of tokens that have passed.

    Those of the output where it has them all, as for a decoded token; else the model's head, on what its layers gave.
    """
    assert call.token_ids is not None
    given = drive.output.get("logits") if isinstance(drive.output, ModelOutput) else None
    if given is not None and given.shape[1] == call.shape[1]:
        return given[:, tile].float()
    drive.replayed = replace(drive.hidden, last_hidden_state=drive.hidden.last_hidden_state[:, tile])
    try:
        return call.for_tokens(call.token_ids[:, tile], all_logits=True).run().logits.float()
    finally:
        drive.replayed = None


def _run_catalyst(drive: Drive, call: _Call, text: str, due: list[BoundedLayer]) -> None:
    """Show layers what the tokens of `text` attend to; of the tokens nothing remains in any layer."""
    cache = drive.cache
    assert call.token_ids is not None
    token_ids = torch.tensor(cache.tokenized(text), device=call.token_ids.device).expand(call.shape[0], -1)
    count = token_ids.shape[1]
    with transient(cache, due), cache.passing(0, count, count), ExitStack() as stack:
        for layer in due:
            stack.enter_context(layer.probing())
        call.for_tokens(token_ids, all_logits=False).run()
