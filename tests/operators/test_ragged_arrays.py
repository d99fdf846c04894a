"""Decoded tokens of rows of several lengths take arrays in every layer, also in steps that finalize blocks."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.families.retrieval.attention import RetrievalAttention
from hetero_kv.serving.forward import ModelForward, Part
from hetero_kv.threads import set_threads
from tests.support.ragged_rows import padded, prompt
from tests.support.tiny_models import tiny_model

SETTINGS = {
    "block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "max_seq_len": 256, "kv_type": "FP32",
    # As tests of estimates store them, so that kernels are theirs.
    "representative_storage": "FP32",
}  # fmt: skip
LENGTHS = (50, 9, 31, 31, 64)
#: More tokens than a block, so that every row fills one.
TOKENS = 9


@torch.no_grad()
def decoded(model, prompts):
    """Logits [rows, TOKENS, vocab] behind a batch of prompts; the tokens differ between rows."""
    cache = HeteroCache(model, 256)
    token_ids, mask = padded(prompts)
    model(token_ids, attention_mask=mask, past_key_values=cache)
    new = torch.stack([(each[:1] + torch.arange(TOKENS)) % 90 + 2 for each in prompts])
    return torch.cat([model(new[:, at : at + 1], past_key_values=cache).logits for at in range(TOKENS)], dim=1)


def groups_per_call(monkeypatch):
    """A list that fills with the number of groups that each native call takes."""
    counts, attend = [], RetrievalAttention._attend_natively

    def counted(self, native, groups, *rest, **more):
        counts.append(len(groups))
        return attend(self, native, groups, *rest, **more)

    monkeypatch.setattr(RetrievalAttention, "_attend_natively", counted)
    return counts


def test_groups_of_two_stores_attend_one_by_one(monkeypatch):
    model = tiny_model("qwen2")
    inject(model, "dense", command_line=SETTINGS | {"weights": "q8_0"})
    prompts = [prompt(length, seed) for seed, length in enumerate((31, 40))]
    new = torch.tensor([[7], [9]])
    caches = [HeteroCache(model, 256) for _ in prompts]
    with torch.no_grad():
        for each, cache in zip(prompts, caches, strict=True):
            model(each[None], past_key_values=cache)
        expected = [model(new[row : row + 1], past_key_values=cache).logits for row, cache in enumerate(caches)]
        caches[0].crop(-1)
        caches[1].crop(-1)
        caches[0].extend(caches[1])
        counts = groups_per_call(monkeypatch)
        logits = model(new, past_key_values=caches[0]).logits
    assert counts == [1] * 2 * model.config.num_hidden_layers
    assert float((logits - torch.cat(expected)).norm() / logits.norm()) < 1e-4


def test_a_layer_whose_groups_attend_one_by_one_reads_the_rows_of_each(monkeypatch):
    """Beside a layer with the same settings whose groups attend together."""
    model = tiny_model("qwen2")
    inject(model, "dense", command_line=SETTINGS | {"weights": "q8_0"})
    prompts = [prompt(length, seed) for seed, length in enumerate((31, 40, 9))]
    together = decoded(model, prompts)
    counts, takes = groups_per_call(monkeypatch), RetrievalAttention.takes_together

    def first_only(self, prepared):
        return takes(self, prepared) and self.layer_idx == 0

    monkeypatch.setattr(RetrievalAttention, "takes_together", first_only)
    # Threads share the work of one row otherwise, which rounds sums otherwise.
    torch.testing.assert_close(decoded(model, prompts), together, rtol=0, atol=1e-4)
    assert set(counts) == {1, 3}


@pytest.mark.parametrize(
    ("recipe", "settings", "groups"),
    [
        pytest.param("dense", {}, {4}, marks=pytest.mark.slow),
        pytest.param("quest", {"top_k_blocks": 3}, {4}, marks=pytest.mark.slow),
        # With a schedule each group keeps its selection; the first layers attend to everything.
        ("quest", {"top_k_blocks": 3, "token_step": 2}, {1, 4}),
        ("adaptive", {"max_dense_blocks": 2, "top_k_blocks": 6}, {4}),
        pytest.param("adaptive", {}, {4}, marks=pytest.mark.slow),
    ],
)
def test_rows_of_several_lengths_take_arrays_and_are_what_they_are_alone(recipe, settings, groups, monkeypatch):
    model = tiny_model("qwen2")
    inject(model, recipe, command_line=SETTINGS | {"weights": "q8_0"} | settings)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = torch.cat([decoded(model, [each]) for each in prompts])
    tensors, whole = [], FusedDecodeLayer.queries_keys_values

    def counted(self, *arguments):
        tensors.append(self.operator.layer_idx)
        return whole(self, *arguments)

    monkeypatch.setattr(FusedDecodeLayer, "queries_keys_values", counted)
    in_one_call = groups_per_call(monkeypatch)
    together = decoded(model, prompts)
    assert float((together - alone).norm() / alone.norm()) < 1e-4
    assert set(in_one_call[4 * model.config.num_hidden_layers :]) == groups
    # The first token binds the native call of each layer.
    assert len(tensors) == model.config.num_hidden_layers


@torch.no_grad()
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("dense", {}),
        ("quest", {"top_k_blocks": 3}),
        ("adaptive", {"max_dense_blocks": 2, "top_k_blocks": 6}),
        pytest.param("adaptive", {}, marks=pytest.mark.slow),
    ],
)
def test_drafts_beside_another_row_take_arrays_and_their_tokens_are_as_one_by_one(recipe, settings):
    model = tiny_model("qwen2")
    inject(model, recipe, command_line=SETTINGS | {"weights": "q8_0"} | settings)
    forward = ModelForward(model, None)
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((50, 31, 64))]
    caches = [HeteroCache(model, 256) for _ in prompts]
    for tokens, cache in zip(prompts, caches, strict=True):
        forward.prefill(cache, Part(tokens, 0, len(tokens), 0, None))
        # The first token binds the native call of each layer.
        forward.decode([cache], [5])
    new = [[(7 * row + 3 * place) % 90 + 2 for place in range(TOKENS)] for row in range(len(prompts))]
    alone = [
        [forward.decode([fork], [token])[0] for token in each]
        for each, fork in zip(new, [c.fork() for c in caches], strict=True)
    ]
    # How many tokens of each pass, and how many of these stay.
    counts = [[(5, 2), (1, 1), (4, 4)], [(3, 3), (2, 1), (1, 1)], [(4, 4), (3, 3), (4, 2)]]
    done = [0] * len(prompts)
    for step in counts:
        passing = [each[at : at + count] for each, at, (count, _) in zip(new, done, step, strict=True)]
        logits, stored = forward.verify(caches, passing)
        for row, (count, kept) in enumerate(step):
            expected = torch.stack(alone[row][done[row] : done[row] + count])
            assert float((logits[row] - expected).norm() / expected.norm()) < 1e-4
            stored[row].keep(kept)
            done[row] += kept
    assert [cache.get_seq_length() for cache in caches] == [
        len(tokens) + 1 + count for tokens, count in zip(prompts, done, strict=True)
    ]


@pytest.fixture(params=[1, 2])
def threads(request):
    """Torch's number of threads, and that of kernels."""
    before = torch.get_num_threads()
    set_threads(request.param)
    yield
    set_threads(before)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("dense", {}),
        ("quest", {"top_k_blocks": 3}),
        ("quest", {"top_k_blocks": 3, "kv_type": "FP16"}),
        ("adaptive", {"max_dense_blocks": 2, "top_k_blocks": 6}),
        ("adaptive", {"max_dense_blocks": 2, "top_k_blocks": 6, "attend_to": "blocks"}),
        ("adaptive", {}),
    ],
)
@pytest.mark.usefixtures("threads")
def test_a_draft_has_the_logits_of_its_tokens_one_by_one_bit_by_bit(recipe, settings, monkeypatch):
    """Packed weights quantize activations: sums in another order would change a logit by hundredths."""
    model = tiny_model("qwen2")
    inject(model, recipe, command_line=SETTINGS | {"weights": "q8_0"} | settings)
    forward = ModelForward(model, None)
    tokens = prompt(64, 1).tolist()
    cache = HeteroCache(model, 256)
    forward.prefill(cache, Part(tokens, 0, len(tokens), 0, None))
    forward.decode([cache], [5])
    new, fork = [(3 * place) % 90 + 2 for place in range(TOKENS)], cache.fork()
    alone = torch.stack([forward.decode([fork], [token])[0] for token in new])
    found, in_one_call, passing = [], groups_per_call(monkeypatch), iter(new)
    # The second token of the second draft begins a block.
    for count in (2, 2, 4, 1):
        (logits,), _ = forward.verify([cache], [list(islice(passing, count))])
        found.append(logits)
    assert torch.equal(torch.cat(found), alone)
    assert in_one_call == [count for count in (2, 2, 4, 1) for _ in range(model.config.num_hidden_layers)]
