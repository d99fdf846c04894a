"""Self-Extend: a model under its rules computes the paper's two score matrices, with every storage."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.families.self_extend.positions import GroupedPositions
from hetero_kv.planning.plan import Footprint
from tests.support.devices import model_on
from tests.support.rotated_vectors import turned
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP, WINDOW = 4, 12
SMALL = {
    "chunk_size": 16, "block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "max_seq_len": 256, "kv_type": "FP32",
    "threads_num": 1, "position_group": GROUP, "neighbour_window": WINDOW,
}  # fmt: skip
COVERING = {"self_extend": {}, "self_extend_quest": {"top_k_blocks": 500, "dense_layer_num": 0}}
IDS = torch.randint(2, 97, (1, 90), generator=torch.Generator().manual_seed(0))
PARTS = [IDS[:, :61], *IDS[:, 61:66].split(1, dim=1), IDS[:, 66:87], *IDS[:, 87:].split(1, dim=1)]


def _reference(module, query, key, value, attention_mask, scaling, **_):
    """Equations 3 and 4 of the paper: normal scores within the window, grouped ones beyond, one softmax."""
    n, group = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    p = torch.arange(n)
    near = query.double() @ key.double().mT
    far = turned(query, p // GROUP + WINDOW - WINDOW // GROUP - p) @ turned(key, p // GROUP - p).mT
    distance = p[:, None] - p[None]
    scores = torch.where(distance < WINDOW, near, far).masked_fill(distance < 0, float("-inf")) * scaling
    return (scores.softmax(-1) @ value.double()).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("self_extend_reference", _reference)
AttentionMaskInterface.register("self_extend_reference", lambda *_, **__: None)


def logits(model, cache, parts):
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected():
    with torch.no_grad():
        return tiny_model("llama", attn_implementation="self_extend_reference")(IDS).logits


@pytest.fixture
def extended(model):
    """A function that puts a recipe in: the cache."""

    def injected(recipe="self_extend", **settings):
        inject(model, recipe, command_line={**SMALL, **COVERING[recipe], **settings})
        return HeteroCache(model)

    yield injected
    if getattr(model, "hetero_kv_injection", None) is not None:
        eject(model)


@pytest.mark.parametrize("recipe", with_few(COVERING))
def test_chunks_tokens_and_a_second_turn_are_the_papers_attention(model, extended, expected, recipe):
    found = logits(model, extended(recipe), PARTS)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


# In pieces: tests/operators/test_grouped_prompts_on_cuda.py.
@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_a_device_has_the_whole_sequence_in_a_second_turn(expected, device):
    model = model_on(device, tiny_model("llama"))
    inject(model, "self_extend", command_line=SMALL)
    found = logits(model, HeteroCache(model), [part.to(device) for part in PARTS]).cpu()
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_groups_of_one_token_and_windows_over_everything_are_plain_attention(model, extended, expected):
    plain = tiny_model("llama")(IDS).logits
    assert float((plain - expected).abs().max() / plain.abs().max()) > 1e-2
    for settings in ({"position_group": 1}, {"neighbour_window": 100}):
        found = logits(model, extended(**settings), PARTS)
        assert float((found - plain).abs().max() / plain.abs().max()) < 1e-4
        eject(model)


def test_few_pages_are_attended_to_and_what_they_cover_is_measured(model, extended, expected):
    cache = extended("self_extend_quest", top_k_blocks=2, measure_recall=True)
    found = logits(model, cache, PARTS)
    assert float((found[:, -1] - expected[:, -1]).abs().max() / expected.abs().max()) > 1e-3
    assert all(0 < share < 1 for share in cache.statistics["block_recall"])
    eject(model)
    cache = extended("self_extend_quest", measure_recall=True)
    logits(model, cache, PARTS)
    assert cache.statistics["block_recall"] == pytest.approx([1, 1, 1], abs=1e-5)


def test_forks_saved_contexts_cuts_and_rows_go_on_as_if_nothing_had_been(model, extended, expected, tmp_path):
    cache = extended()
    logits(model, cache, PARTS[:6])
    whole = logits(model, cache.fork(), PARTS[6:])
    cache.save(tmp_path / "context", IDS[:, :66])
    assert logits(model, HeteroCache.load(tmp_path / "context", model), PARTS[6:]).equal(whole)
    fork = cache.fork()
    fork.select([0, 0])
    logits(model, fork, [torch.cat([IDS[:, 66:67], IDS[:, :1]])])
    fork.crop(-1)
    both = logits(model, fork, [part.expand(2, -1) for part in PARTS[6:]])
    torch.testing.assert_close(both, whole.expand(2, -1, -1), rtol=1e-4, atol=1e-4)
    assert logits(model, cache, PARTS[6:]).equal(whole)


def test_the_plan_counts_the_window_with_keys_twice(model, extended):
    cache = extended()
    logits(model, cache, PARTS[:1])
    window = cache.layers[0].window
    assert cache.layers[0].dram_bytes == window.nbytes == 3 * window.keys.numel() * 4
    assert Footprint.of(model.hetero_kv_injection).memory(90).windows == 3 * window.nbytes


def test_distances_are_those_of_the_formula_and_grow_by_one_a_group():
    positions = GroupedPositions(GROUP, WINDOW)
    p = torch.arange(200)
    assert positions.of_queries(p)[:WINDOW].equal(p[:WINDOW])
    far = positions.of_queries(p)[WINDOW:, None] - positions.of_keys(p)[None]
    beyond = p[WINDOW:, None] - p[None] >= WINDOW
    assert int(far[beyond].min()) >= WINDOW - 1
    assert int(far[beyond].max()) <= WINDOW + (200 - WINDOW) // GROUP + 1


def test_a_rotation_that_changes_with_the_length_is_refused_by_name():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=r"'dynamic'.*SelfExtendAttention cannot.*use RetrievalAttention"):
        inject(tiny_model("llama", rope_parameters=rope), "self_extend", command_line=SMALL)


@pytest.mark.parametrize("recipe", with_few(["self_extend", "infllm_stream"], quick=["infllm_stream"]))
def test_a_token_that_fails_leaves_the_window_as_it_was_where_less_is_stored(recipe):
    """Decoded tokens lie in the window as they were computed, and in blocks rounded."""
    model = tiny_model("llama", head_dim=32)
    small = {"kv_type": "Q8_0", "block_size": 16, "local_windows_len": 16}
    grouped = {"position_group": GROUP, "neighbour_window": WINDOW} if recipe == "self_extend" else {}
    inject(model, recipe, command_line={"chunk_size": 16, "max_seq_len": 256, "threads_num": 1, **small, **grouped})
    found = []
    for fails in (False, True):
        cache = HeteroCache(model)
        with torch.no_grad():
            for part in (IDS[:, :61], *IDS[:, 61:70].split(1, dim=1)):
                model(part, past_key_values=cache)
            if fails:
                hook = model.model.layers[1].mlp.register_forward_pre_hook(_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    model(IDS[:, 80:81], past_key_values=cache)
                hook.remove()
            found.append(model(IDS[:, 70:71], past_key_values=cache).logits)
    assert torch.equal(*found)


def _interrupt(*_):
    raise KeyboardInterrupt
