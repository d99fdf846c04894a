"""What holds for every way in which a GPU chooses: blocks or single tokens, attended to there or on the CPU."""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest
import torch

from hetero_kv import HeteroCache, HeteroKVError, eject
from hetero_kv.families.retrieval import resident_context, token_slot_context
from hetero_kv.families.retrieval.layer import RetrievalLayer
from tests.operators.resident_models import injected, llama_on_gpu, random_tokens, told

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")


class Way(NamedTuple):
    """Rules by which a GPU chooses, and the kernel by which it reads what it lacks; None where the CPU attends."""

    attend_on: str
    settings: dict
    reading: tuple | None

    def cache(self, model, **settings):
        return injected(model, self.attend_on, **self.settings, **settings)


#: Of blocks of 16 tokens with coarse keys, from which single ones are chosen.
SINGLE = {"recipe": "adaptive", "block_size": 16, "sink_tokens": 16, "local_windows_len": 16, "min_blocks": 0}
WAYS = {
    "blocks": Way("gpu", {}, (resident_context, "fetch")),
    "tokens": Way("gpu", SINGLE, (token_slot_context, "fetch_tokens")),
    "packed tokens": Way("gpu", {**SINGLE, "kv_type": "Q4_0"}, (token_slot_context, "fetch_tokens")),
    "blocks for the CPU": Way("cpu", {"engine": {"index_device": "gpu"}}, None),
    "blocks for the CPU by what keys receive": Way(
        "cpu", {"recipe": "ktransformers", "engine": {"index_device": "gpu"}}, None
    ),
}
READING = [name for name, way in WAYS.items() if way.reading is not None]


@pytest.fixture
def llama(gpu):
    model = llama_on_gpu(head_dim=32)
    for layer in model.model.layers:
        # Peaked attention, of which few tokens have most.
        layer.self_attn.q_proj.weight.mul_(4.0)
    yield model
    # Caches unlock their memory while the GPU is there.
    gc.collect()


@pytest.fixture(params=list(WAYS))
def way(request):
    return WAYS[request.param]


@torch.no_grad()
def test_rows_of_several_lengths_equal_each_row_alone(llama, way):
    lengths, tokens, count = (90, 67), random_tokens(96, rows=2), 6
    alone = []
    for row, length in enumerate(lengths):
        cache = way.cache(llama)
        alone.append(told(llama, cache, tokens[row : row + 1, : length + count], prompt=length))
        eject(llama)
    cache = way.cache(llama)
    padded = torch.zeros(2, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, length in enumerate(lengths):
        padded[row, -length:], mask[row, -length:] = tokens[row, :length], 1
    llama(padded.to("cuda"), attention_mask=mask.to("cuda"), past_key_values=cache)
    for place in range(count):
        next_ones = torch.stack([tokens[row, length + place] for row, length in enumerate(lengths)])[:, None]
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
        logits = llama(next_ones.to("cuda"), attention_mask=mask.to("cuda"), past_key_values=cache).logits.cpu()
        expected = torch.stack([alone[row][1 + place][0] for row in range(2)])
        torch.testing.assert_close(logits[:, -1], expected, rtol=1e-4, atol=1e-4)


def test_a_saved_context_continues_as_if_nothing_had_happened(llama, way, tmp_path):
    cache, tokens = way.cache(llama), random_tokens(94)
    told(llama, cache, tokens[:, :88], prompt=80)
    cache.save(tmp_path / "context")
    expected = torch.cat(told(llama, cache, tokens[:, 88:]))
    loaded = HeteroCache.load(tmp_path / "context", llama)
    assert torch.equal(torch.cat(told(llama, loaded, tokens[:, 88:])), expected)


def test_a_failed_token_is_undone(llama, way, monkeypatch):
    # The token that fails has a block enter the Context.
    cache, tokens = way.cache(llama, cuda_graphs="on"), random_tokens(104)
    told(llama, cache, tokens[:, :96], prompt=80)
    fork = cache.fork()
    expected = torch.cat(told(llama, fork, tokens[:, 96:]))
    with monkeypatch.context() as patch:

        def refuse(self, *numbers):
            raise HeteroKVError("on purpose")

        # The second is for tokens that torch stores.
        for check in ("require_storable", "_require_finite"):
            patch.setattr(RetrievalLayer, check, refuse)
        with pytest.raises(HeteroKVError, match="on purpose"):
            told(llama, cache, random_tokens(1, seed=9))
    torch.testing.assert_close(torch.cat(told(llama, cache, tokens[:, 96:])), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", READING)
def test_a_token_that_fails_between_its_slots_leaves_none_that_lies(llama, name, monkeypatch):
    way, tokens = WAYS[name], random_tokens(90)
    assert way.reading is not None
    expected = told(llama, way.cache(llama), tokens, prompt=80)
    eject(llama)
    cache = way.cache(llama)
    found = told(llama, cache, tokens[:, :80], prompt=80)
    calls, read = [], getattr(*way.reading)

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(*way.reading, failing)
    with pytest.raises(KeyboardInterrupt):
        told(llama, cache, tokens[:, 80:])
    found += told(llama, cache, tokens[:, 80:])
    eject(llama)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
def test_what_is_not_read_is_seen(llama, name, monkeypatch):
    way, tokens = WAYS[name], random_tokens(105)
    assert way.reading is not None
    expected = torch.cat(told(llama, way.cache(llama), tokens, prompt=90))
    eject(llama)
    monkeypatch.setattr(*way.reading, lambda *args: None)
    found = torch.cat(told(llama, way.cache(llama), tokens, prompt=90))
    assert not torch.allclose(found, expected, rtol=1e-2)
