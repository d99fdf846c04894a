"""Eviction after a part of a forward has passed all bounded layers: score, allocate, run a catalyst, evict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from hetero_kv.errors import HeteroKVError
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy

if TYPE_CHECKING:
    from hetero_kv.adapter.strided_prefill import StridedForward
    from hetero_kv.families.bounded.layer import BoundedLayer

# Tokens whose logits are computed at once, because a vocabulary is large.
_LOGITS_AT_ONCE = 256


def evict_jointly(layers: Sequence[BoundedLayer], strided: StridedForward) -> None:
    """Evict entries of the layers whose policies wait for the last layer."""
    late = [layer for layer in layers if layer.policy.evicts_after_all_layers]
    if not late:
        return
    for policy, members in _by_policy(late):
        if policy.needs_logits:
            _score_tokens(strided, policy, members)
    for policy, members in _by_policy(late):
        if policy.allocates and strided.tokens > 1:
            cached = [layer.entries for layer in members if layer.entries is not None]
            budgets = [layer.policy.budget_for(layer.prompt_length) for layer in members]
            for layer, budget in zip(members, policy.allocate(cached, budgets), strict=True):
                layer.budget = budget
        due = [layer for layer in members if layer.is_due]
        text = policy.catalyst_text()
        if due and text is not None:
            with ExitStack() as stack:
                for layer in due:
                    stack.enter_context(layer.probing())
                strided.run_transient(strided.cache.tokenized(text), lasting=due)
        for layer in members:
            layer.evict_if_due(strided.tokens)


def _by_policy(layers: Sequence[BoundedLayer]) -> list[tuple[EvictionPolicy, list[BoundedLayer]]]:
    """Groups layers of the same policy with the same settings."""
    groups: dict[Any, list[BoundedLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.policy.settings, []).append(layer)
    return [(members[0].policy, members) for members in groups.values()]


def _score_tokens(strided: StridedForward, policy: EvictionPolicy, layers: Sequence[BoundedLayer]) -> None:
    """Score the newest tokens by the policy's function of their logits, one tile of tokens at a time."""
    tokens = strided.token_ids
    if tokens is None:
        raise HeteroKVError(
            f"policy {policy.settings.policy} scores tokens by their logits, but the model was called with "
            "inputs_embeds; call it with input_ids"
        )
    if not strided.has_head:
        raise HeteroKVError(
            f"policy {policy.settings.policy} needs the model's logits, but the decoder was called without its head; "
            "call the whole model: model(input_ids, past_key_values=cache)"
        )
    entries = layers[0].entries
    assert entries is not None
    before: torch.Tensor | None = entries.carried.get("last_logits")
    scores = []
    for start in range(0, tokens.shape[1], _LOGITS_AT_ONCE):
        tile = slice(start, min(start + _LOGITS_AT_ONCE, tokens.shape[1]))
        logits = strided.logits(tile)
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
