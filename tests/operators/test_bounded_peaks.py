"""The peak memory of a bounded layer: during a chunk's attention, and between forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass

import pytest
import torch

from hetero_kv import eject
from hetero_kv.families.bounded import eviction
from hetero_kv.families.bounded.entry_buffer import SLACK, EntryBuffer
from tests.operators.bounded_models import SMALL, bounded, conversation, logits, tokens
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

# A stride that is more than the room behind what stays.
BUDGET, STRIDE, CATALYST = 24, SLACK + 8, 3
LAYERS = 2
#: Bytes of a key and a value, of both kv heads.
ENTRY = 2 * 2 * 16 * 4


def small(policy):
    """Settings for small prompts, with STRIDE where the policy has strides of a fixed size."""
    fixed = issubclass(eviction.get(policy).settings, eviction.StridedSettings)
    return {**SMALL.get(policy, {}), **({"stride": STRIDE} if fixed else {})}


_STRIDED = {name: eviction.get(name).implementation.strided for name in eviction.names()}
# Of those that take prompts alike, by what they do with entries, one is quick.
_ALIKE = {"bigbird", "tova", "sirllm", "cam", "random", "roco", "snapkv"}


def each_of(strided):
    """Parameters of policies: a name and settings."""
    marks = {name: pytest.mark.slow if name in _ALIKE else () for name in _STRIDED if _STRIDED[name] == strided}
    return [pytest.param(name, small(name), id=name, marks=mark) for name, mark in marks.items()]


IN_STRIDES = each_of(strided=True)
IN_STRIDES += [pytest.param("random", {"prefill": "strided", "stride": STRIDE}, id="random in strides")]
WHOLE = each_of(strided=False)


@pytest.fixture(scope="module")
def shared_llama():
    return tiny_model("llama", num_hidden_layers=LAYERS)


@pytest.fixture
def llama(shared_llama):
    """A tiny Llama of two layers, without rules after each test."""
    yield shared_llama
    eject(shared_llama)


@dataclass
class Moment:
    """While a chunk was attended to in a layer: entries that it attended to, itself included, bytes that their keys and
    values lie in, and entries that every layer has."""

    layer: int
    attended: int
    room: int
    entries: list[int]


@pytest.fixture
def watched(monkeypatch):
    """policy -> ([Moment] of a prompt's and an answer's chunks, [Moment] of the catalyst's), filled by `cache`."""

    def watch(policy, cache):
        moments = []
        kind = eviction.get(policy).implementation
        for hook in ("observe", "observe_catalyst"):
            own, seen = getattr(kind, hook), []

            def noted(self, entries, attended, own=own, seen=seen):
                room = _bytes_of([attended.keys, entries.keys, entries.values])
                counts = [layer.num_entries for layer in cache.layers]
                seen.append(Moment(self.layer_idx, attended.keys.shape[2], room, counts))
                return own(self, entries, attended)

            monkeypatch.setattr(kind, hook, noted)
            moments.append(seen)
        return moments

    return watch


def _bytes_of(tensors):
    """Memory of `tensors`, what several of them share counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def key_value_bytes(layer):
    """Memory of everything of a layer that is as keys and values are, [batch, kv_heads, entries, dim]."""
    found, todo = [], [vars(layer)]
    while todo:
        thing = todo.pop()
        if isinstance(thing, torch.Tensor):
            found += [thing] if thing.dim() == 4 else []
        elif isinstance(thing, Mapping):
            todo += thing.values()
        elif is_dataclass(thing) or isinstance(thing, EntryBuffer):
            todo.append(vars(thing))
    return _bytes_of(found)


#: Of prompts, and what is attended to at most.
LENGTHS = [(5, 25), (BUDGET, 25), (50, STRIDE), (160, BUDGET + STRIDE)]


@pytest.mark.parametrize(
    ("length", "peak"),
    with_slow(LENGTHS, slow=LENGTHS[:3]),
)
@pytest.mark.parametrize(("policy", "settings"), IN_STRIDES)
def test_attention_spans_at_most_the_budget_and_a_stride_for_every_prompt(
    llama, watched, policy, settings, length, peak
):
    cache = bounded(llama, policy=policy, budget=BUDGET, **settings)
    chunks, catalysts = watched(policy, cache)
    logits(llama, cache, tokens(length), *tokens(30, 1).split(1, dim=1))
    is_pot = cache.layers[0].policy.catalyst_text() is not None
    # A pot is never more than full, but for the catalyst behind it while that is read.
    peak = BUDGET if is_pot else peak
    assert max(moment.attended for moment in chunks) == peak
    assert {moment.attended for moment in catalysts} == ({BUDGET + CATALYST} if is_pot else set())
    # Where places change, keys are there twice: before rotation, and at their places.
    copies = 1.5 if cache.layers[0].policy.reindexed else 1
    assert max(moment.room for moment in chunks) <= copies * max(peak, BUDGET + 1 + SLACK) * ENTRY


@pytest.mark.parametrize(("policy", "settings"), WHOLE)
def test_one_layer_holds_the_prompt_at_a_time_and_the_others_their_budget(llama, watched, policy, settings):
    cache = bounded(llama, policy=policy, budget=BUDGET, **settings)
    chunks, _ = watched(policy, cache)
    entries = [0] * LAYERS
    for part in (tokens(100), *tokens(9, 1).split(1, dim=1), tokens(70, 2)):
        chunks.clear()
        logits(llama, cache, part)
        for layer, before in enumerate(entries):
            there = [moment for moment in chunks if moment.layer == layer]
            assert max(moment.attended for moment in there) == before + part.shape[1]
            assert max(moment.room for moment in there) <= (before + max(part.shape[1], 1 + SLACK)) * ENTRY
            if cache.layers[layer].policy.allocates:
                # What a layer may keep is known when all have seen the prompt.
                after = [before + part.shape[1] for before in entries[:layer]]
            else:
                after = [each.budget for each in cache.layers[:layer]]
            for moment in there:
                assert moment.entries[:layer] == after
                assert moment.entries[layer + 1 :] == entries[layer + 1 :]
        entries = [layer.budget for layer in cache.layers]
        assert cache.statistics["cached_entries"] == entries
        assert sum(entries) == LAYERS * BUDGET


@pytest.mark.parametrize(("policy", "settings"), IN_STRIDES + WHOLE)
def test_between_forwards_a_layer_has_memory_for_what_it_holds_and_a_few_tokens_and_says_so(llama, policy, settings):
    cache = bounded(llama, policy=policy, budget=BUDGET, **settings)
    for part in (*conversation(), tokens(120)):
        logits(llama, cache, part)
        for layer in cache.layers:
            assert layer.num_entries <= layer.budget
            copies = 1.5 if layer.policy.reindexed else 1
            assert key_value_bytes(layer) <= copies * (layer.num_entries + SLACK) * ENTRY
            assert key_value_bytes(layer) <= layer.dram_bytes
        assert sum(cache.statistics["cached_entries"]) <= LAYERS * BUDGET
