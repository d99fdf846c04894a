"""What eviction policies may request: logits, a catalyst, a view of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from hetero_kv import HeteroCache, eject
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.bounded import eviction
from hetero_kv.families.bounded.eviction import StridedSettings, policy_setting, registry
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.bounded.eviction.ranking import best
from tests.operators.bounded_models import Letters, bounded, conversation, logits, tokens
from tests.support.tiny_models import tiny_model


@dataclass(frozen=True)
class ProbeSettings(StridedSettings):
    """A policy that asks for everything, for these tests."""

    policy: str = policy_setting("probe")


class Probe(EvictionPolicy[ProbeSettings]):
    """Keeps what is least likely, of layers that get ever fewer entries; notes what it is shown."""

    strided, needs_logits, allocates = True, True, True
    seen: ClassVar[list] = []
    catalyst: ClassVar[str | None] = "abc"

    def token_scores(self, logits, tokens):
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")

    def catalyst_text(self):
        return self.catalyst

    def observe_catalyst(self, entries, attended):
        sums = attended.column_sums()
        self.seen.append((self.layer_idx, entries.num_entries, attended.keys.shape[2], sums.shape[3]))
        return entries.scored(catalyst=entries.score("catalyst") + sums[..., : entries.num_entries].sum(2))

    def allocate(self, layers, budgets):
        return [budget - 2 * index for index, budget in enumerate(budgets)]

    def evict(self, entries, budget):
        return entries.kept(best(entries.score("token"), budget))


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.setattr(registry.POLICIES, "known", dict(registry.POLICIES.known))
    eviction.register("probe", meaning="for these tests", implementation=Probe)(ProbeSettings)
    monkeypatch.setattr(Probe, "seen", [])
    monkeypatch.setattr(Probe, "catalyst", "abc")
    return Probe


def probed(model, **settings):
    bounded(model, policy="probe", **settings)
    return HeteroCache(model, tokenizer=Letters())


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite"])
def test_tokens_are_scored_by_the_logits_that_predicted_them(probe, monkeypatch, architecture):
    monkeypatch.setattr("hetero_kv.families.bounded.joint_eviction._LOGITS_AT_ONCE", 7)
    model = tiny_model(architecture)
    sequence = tokens(60, batch=2)
    with torch.no_grad():
        untouched = model(sequence).logits.float()
    expected = torch.nn.functional.cross_entropy(untouched[:, :-1].transpose(1, 2), sequence[:, 1:], reduction="none")
    cache = probed(model, budget=100, stride=16)
    logits(model, cache, sequence[:, :40], *sequence[:, 40:45].split(1, dim=1), sequence[:, 45:])
    for layer in cache.strided_layers:
        scores = layer.entries.score("token")
        assert scores[..., 0].isinf().all()
        for head in range(2):
            torch.testing.assert_close(scores[:, head, 1:], expected, rtol=1e-3, atol=1e-4)


def test_the_least_likely_tokens_stay_and_every_layer_has_its_own_budget(probe, llama):
    cache = probed(llama, budget=20, stride=16)
    logits(llama, cache, tokens(60))
    assert cache.statistics["cached_entries"] == [20, 18, 16]
    first = [layer.entries.positions[0, 0].tolist() for layer in cache.layers]
    assert all(kept[0] == 0 for kept in first)
    assert set(first[2]) <= set(first[1]) <= set(first[0])
    logits(llama, cache, *tokens(5, 1).split(1, dim=1))
    assert cache.statistics["cached_entries"] == [20, 18, 16]


def test_a_catalyst_is_seen_by_layers_that_are_due_and_leaves_nothing(probe, llama):
    retrieval = {"match": {"name": r"layers\.2\.self_attn$"}, "replace": {"class": "RetrievalAttention"}}
    cache = probed(llama, budget=20, stride=16)
    eject(llama)
    bounded(llama, retrieval, policy="probe", budget=20, stride=16, max_seq_len=200)
    cache = HeteroCache(llama, tokenizer=Letters())
    logits(llama, cache, tokens(16))
    assert probe.seen == []
    logits(llama, cache, tokens(16, 1))
    # The catalyst's three tokens follow the kept entries, and are no entries themselves.
    assert probe.seen == [(0, 32, 35, 35), (1, 32, 35, 35)]
    assert [layer.get_seq_length() for layer in cache.layers] == [32, 32, 32]
    assert cache.statistics["cached_entries"] == [20, 18, None]
    assert all((layer.entries.scores["catalyst"] > 0).all() for layer in cache.strided_layers)
    total = float(cache.layers[0].entries.scores["catalyst"].sum())
    # Three queries of four heads give at most their whole attention.
    assert 0 < total < 3 * 4


def test_a_catalyst_changes_no_answer_where_its_scores_are_not_used(probe, llama, monkeypatch):
    cache = probed(llama, budget=20, stride=16)
    expected = logits(llama, cache, *conversation())
    assert probe.seen
    monkeypatch.setattr(probe, "catalyst", None)
    probe.seen.clear()
    assert logits(llama, HeteroCache(llama), *conversation()).equal(expected)
    assert probe.seen == []


def test_a_chunk_that_is_smaller_than_the_catalyst_shows_it_in_parts(probe, llama):
    bounded(llama, policy="probe", budget=20, stride=40, chunk_size=2)
    cache = HeteroCache(llama, tokenizer=Letters())
    logits(llama, cache, tokens(30))
    assert [columns for layer, _, columns, _ in probe.seen if layer == 0] == [32, 33]


def test_a_policy_that_needs_logits_refuses_a_decoder_without_a_head(probe, llama):
    cache = probed(llama, budget=20)
    with pytest.raises(HeteroKVError, match=r"probe needs the model's logits.*call the whole model"):
        llama.model(tokens(10), past_key_values=cache)
    with pytest.raises(HeteroKVError, match="call it with input_ids"):
        llama(inputs_embeds=torch.zeros(1, 5, 64), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_catalyst_without_a_tokenizer_is_an_error_with_the_remedy(probe, llama):
    bounded(llama, policy="probe", budget=20)
    with pytest.raises(HeteroKVError, match=r"needs a tokenizer.*HeteroCache\(model, tokenizer=tokenizer\)"):
        logits(llama, HeteroCache(llama), tokens(30))


def test_a_policy_that_keeps_too_many_is_named(probe, llama, monkeypatch):
    monkeypatch.setattr(probe, "evict", lambda self, entries, budget: entries)
    cache = probed(llama, budget=20)
    with pytest.raises(HeteroKVError, match="policy probe left 30 entries, but the budget is 20"):
        logits(llama, cache, tokens(30))
