"""Where within a layer a prompt's forward pauses, and neither it nor the others' tokens change."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_prefill_layer import FusedPrefillLayer
from hetero_kv.adapter.kernel_mixer import KernelMixer
from hetero_kv.families.retrieval.attention import RetrievalAttention
from hetero_kv.serving.forward import ModelForward, Part
from tests.support.bfloat16_errors import require_as_exact
from tests.support.ragged_rows import prompt
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_attention_beside_a_state_pauses_and_both_keep_their_kernels(monkeypatch):
    monkeypatch.setattr("hetero_kv.families.retrieval.exact_prefill._SCORES_BETWEEN_PAUSES", 1)
    model = tiny_model("falcon_h1")
    inject(model, "dense", command_line={"block_size": 16, "max_seq_len": 700, "chunk_size": 256})
    forward, tokens = ModelForward(model), prompt(600, 3).tolist()
    assert forward.pauses
    other, others_alone, whole, cut = (HeteroCache(model) for _ in range(4))
    for cache in (other, others_alone):
        forward.prefill(cache, Part(tokens, 0, 40, 40, None))
    with whole.requesting(pause=lambda: None):
        expected = forward.prefill(whole, Part(tokens, 0, 600, 0, None))
    layers, pauses = [each for each in model.modules() if isinstance(each, ChunkedDecoderLayer)], []
    kernels = [layer._kernels for layer in layers]
    assert {type(each) for each in kernels} == {KernelMixer}
    with cut.requesting(pause=lambda: pauses.append(forward.decode([other], [7]))):
        assert torch.equal(forward.prefill(cut, Part(tokens, 0, 600, 0, None)), expected)
    # Three chunks of 256, 256 and 88 queries, 64 at a time.
    assert len(pauses) == len(layers) * (3 + 3 + 1)
    assert [layer._kernels for layer in layers] == kernels
    for logits in pauses:
        assert torch.equal(logits, forward.decode([others_alone], [7]))
    for token in (5, 9):
        assert torch.equal(forward.decode([cut], [token]), forward.decode([whole], [token]))


@pytest.mark.parametrize("recipe", ["dense", "adaptive"])
def test_fused_layers_in_bfloat16_pause_within_a_chunk(recipe, monkeypatch):
    monkeypatch.setattr("hetero_kv.families.retrieval.exact_prefill._SCORES_BETWEEN_PAUSES", 1)
    model = tiny_model("qwen2").to(torch.bfloat16)
    settings = {"block_size": 16, "max_seq_len": 700, "weights": "q8_0"}
    inject(model, recipe, command_line=settings)
    forward, tokens = ModelForward(model), prompt(600, 3).tolist()
    other, caches, pauses = HeteroCache(model), [HeteroCache(model), HeteroCache(model)], []
    forward.prefill(other, Part(tokens, 0, 40, 40, None))

    def pause():
        pauses.append(forward.decode([other], [7]))

    parts = Part(tokens, 0, 300, 0, None), Part(tokens, 300, 600, 0, None)
    expected = [forward.prefill(caches[0], part) for part in parts]
    with caches[1].requesting(pause=pause):
        logits = [forward.prefill(caches[1], part) for part in parts]
    exact_model = tiny_model("qwen2").to(torch.bfloat16).float()
    inject(exact_model, recipe, command_line=settings)
    exact_forward, exact_cache = ModelForward(exact_model), HeteroCache(exact_model)
    for mine, theirs, part in zip(logits, expected, parts, strict=True):
        require_as_exact(mine, theirs, exact_forward.prefill(exact_cache, part))
    layers = [each for each in model.modules() if isinstance(getattr(each, "_short", None), FusedPrefillLayer)]
    # Behind the inputs, between five parts of the attention's queries, behind them, and twice in the second half.
    assert len(layers) == len(caches[0].layers)
    assert len(pauses) == 2 * len(layers) * (2 + 4 + 2)
    alone_cache = HeteroCache(model)
    forward.prefill(alone_cache, Part(tokens, 0, 40, 40, None))
    assert torch.equal(pauses[0], forward.decode([alone_cache], [7]))


def test_a_prompt_pauses_while_its_blocks_get_their_representatives(monkeypatch):
    monkeypatch.setattr("hetero_kv.families.retrieval.prefill._KEYS_AT_ONCE", 3 * 2 * 16 * 16)
    model = tiny_model("qwen2")
    inject(model, "adaptive", command_line={"block_size": 16, "max_seq_len": 700})
    forward, tokens = ModelForward(model), prompt(400, 3).tolist()
    other, whole, cut = (HeteroCache(model) for _ in range(3))
    forward.prefill(other, Part(tokens, 0, 40, 40, None))
    expected, pauses = forward.prefill(whole, Part(tokens, 0, 400, 0, None)), []
    represented, places = RetrievalAttention._represent, []

    def representing(*arguments):
        before = len(pauses)
        represented(*arguments)
        places.append(len(pauses) - before)

    monkeypatch.setattr(RetrievalAttention, "_represent", representing)
    with cut.requesting(pause=lambda: pauses.append(forward.decode([other], [7]))):
        assert torch.equal(forward.prefill(cut, Part(tokens, 0, 400, 0, None)), expected)
    assert len(places) == len(cut.layers)
    assert min(places) >= 2
    for token in (5, 9):
        assert torch.equal(forward.decode([cut], [token]), forward.decode([whole], [token]))


def test_a_decoded_token_does_not_pause_while_many_blocks_get_their_representatives(monkeypatch):
    """Its kernels, and their buffers, wait for the end of its forward."""
    monkeypatch.setattr("hetero_kv.families.retrieval.prefill._KEYS_AT_ONCE", 1)
    monkeypatch.setattr("hetero_kv.families.retrieval.entering_blocks._AT_ONCE", 0)
    model = tiny_model("qwen2")
    inject(model, "adaptive", command_line={"block_size": 16, "max_seq_len": 700})
    forward, cache, tokens = ModelForward(model), HeteroCache(model), prompt(400, 3).tolist()
    represented, blocks, pauses = RetrievalAttention._represent, [], []

    def representing(operator, layer, step, start, end):
        blocks.append(end - start)
        represented(operator, layer, step, start, end)

    # A prompt that is cancelled before its last part, behind which a token is replayed.
    forward.prefill(cache, Part(tokens, 0, 300, 0, None))
    monkeypatch.setattr(RetrievalAttention, "_represent", representing)
    with cache.requesting(pause=lambda: pauses.append(1)):
        forward.decode([cache], [7])
    assert max(blocks) > 2
    assert not pauses
