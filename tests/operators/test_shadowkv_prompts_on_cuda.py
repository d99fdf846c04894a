"""A ShadowKV prompt on a GPU: nothing pageable, nothing blocking, no second copy of the past."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroKVError, eject
from hetero_kv.families.gpu_prefill import pieces, writing
from hetero_kv.families.shadowkv import context_layer, key_factors
from hetero_kv.families.shadowkv import layer as low_rank_layer
from tests.operators.shadowkv_models import injected, logits, random_tokens, relative_error
from tests.support.devices import model_on
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda

#: Layers, kv heads and head dim of the tiny Llama here.
LAYERS, HEADS, DIM = 2, 2, 16
#: Tokens of a past that is much longer than a piece.
PAST = 600
SPARSE = {"rank": 8, "sparse_budget": 16, "value_type": "FP16"}


@pytest.fixture
def in_small_pieces(monkeypatch):
    for owner, name in ((pieces, "_TOKENS_AT_ONCE"), (context_layer, "_READ_AT_ONCE")):
        monkeypatch.setattr(owner, name, 64)
    for owner, name in ((writing, "PIECE_TOKENS"), (key_factors, "TILE")):
        monkeypatch.setattr(owner, name, 16)


def llama(**shape):
    return tiny_model("llama", num_hidden_layers=LAYERS, **shape)


def on_gpu(model):
    return model_on(torch.device("cuda", 0), model)


@pytest.mark.parametrize("refactor_above", with_slow([0.0, 1.0], slow=[1.0]))
def test_nothing_is_pageable_and_nothing_blocks(gpu, refactor_above):
    model = on_gpu(llama().to(torch.bfloat16))
    cache = injected(model, **SPARSE, refactor_above=refactor_above, project_generated=True)
    tokens = random_tokens(179, batch=2).to("cuda")
    # A model whose rotation is not known yet; tokens that join the Context as they leave Recent; and a later turn.
    for part in tokens.split([100, *[1] * 9, 70], dim=1):
        gpu.record.clear()
        with torch.no_grad():
            model(part, past_key_values=cache)
        assert gpu.record.pageable == []
        assert not any(copy.is_blocking for copy in gpu.record.copies)
    assert {layer.counted.factored for layer in cache.layers} == {1 if refactor_above else 2}


# What blocks is seen above, and that chunks do not wait for those before below.
@pytest.mark.slow
@pytest.mark.parametrize("value_type", ["FP16", "FP32"])
@pytest.mark.parametrize("refactor_above", [0.0, 0.99, 1.0])
def test_a_later_turn_waits_for_copies_and_once_behind_all_layers(gpu, refactor_above, value_type):
    model = on_gpu(llama().to(torch.bfloat16))
    settings = {**SPARSE, "value_type": value_type, "refactor_above": refactor_above}
    cache = injected(model, **settings)
    *before, turn = random_tokens(178, batch=2).to("cuda").split([100, *[1] * 8, 70], dim=1)
    logits(model, cache, *before)
    gpu.record.clear()
    with torch.no_grad():
        model(turn, past_key_values=cache)
    waits = [wait.line.partition(":")[0] for wait in gpu.record.waits]
    assert waits.count("hetero_kv/gpu_ops/host_copies.py") == 1
    # Eigenvectors, where keys are factored again; the rest are values that leave and return.
    anew = "hetero_kv/families/shadowkv/low_rank_basis.py"
    assert waits.count(anew) == (0 if refactor_above else LAYERS)
    assert set(waits) - {anew, "hetero_kv/gpu_ops/host_copies.py"} == {
        "hetero_kv/gpu_ops/write_out.py",
        "hetero_kv/gpu_ops/prefetch.py",
    }
    assert [layer.counted.factored for layer in cache.layers] == [1 if refactor_above else 2] * LAYERS


@pytest.mark.usefixtures("gpu")
def test_slots_stay_through_a_turn_that_brings_no_new_outlier_and_all_is_counted_as_on_a_cpu():
    # In one of its three layers a turn brings none.
    plain = tiny_model("llama")
    parts = random_tokens(150).split([100, *[1] * 8, 8, *[1] * 8, 8, *[1] * 18], dim=1)
    found, records = [], []
    for model in (plain, on_gpu(plain)):
        cache = injected(model, **SPARSE, refactor_above=1.0)
        seen = []
        for part in parts:
            before = [layer.context.outliers for layer in cache.layers]
            logits(model, cache, part)
            after = [layer.context.outliers for layer in cache.layers]
            if part.shape[1] == 8:
                seen += [new is old for new, old in zip(after, before, strict=True)]
        records.append(seen)
        found.append(cache.statistics)
        eject(model)
    assert records[1] == records[0]
    assert set(records[1]) == {True, False}
    assert found[1]["chunk_hit_rate"] == found[0]["chunk_hit_rate"]
    assert found[1]["key_energy_outside"] == pytest.approx(found[0]["key_energy_outside"])


# The counts of turns are compared with a CPU's above.
@pytest.mark.slow
def test_a_log_of_missed_chunks_that_has_grown_long_is_counted_at_the_end_of_a_turn(gpu, monkeypatch):
    model = on_gpu(llama().to(torch.bfloat16))
    counted = []
    for most in (4096, 5):
        monkeypatch.setattr(low_rank_layer, "MAX_UNREAD", most)
        cache = injected(model, **SPARSE)
        logits(model, cache, *random_tokens(140).split([100, *[1] * 10, 30], dim=1))
        counted.append(([len(layer.missed) for layer in cache.layers], cache.statistics))
        eject(model)
    assert [lengths for lengths, _ in counted] == [[10] * LAYERS, [0] * LAYERS]
    assert counted[0][1] == counted[1][1]


@pytest.mark.usefixtures("in_small_pieces")
# A number that rounding brings over the edge of a step is stored as its neighbour.
@pytest.mark.parametrize(
    ("refactor_above", "value_type", "tolerance"),
    with_slow(
        [(above, *stored) for above in (0.0, 1.0) for stored in (("FP32", 1e-4), ("FP16", 1e-4), ("Q8_0", 1e-3))],
        slow=[(0.0, "FP32", 1e-4), (0.0, "FP16", 1e-4), (1.0, "FP32", 1e-4), (1.0, "FP16", 1e-4), (1.0, "Q8_0", 1e-3)],
    ),
)
def test_a_later_turn_in_pieces_answers_as_one_on_a_cpu(gpu, refactor_above, value_type, tolerance):
    # Groups of 32 need heads of 32 channels.
    plain = llama(**({"head_dim": 32} if value_type == "Q8_0" else {}))
    parts = random_tokens(181, batch=2).split([100, *[1] * 5, 43, *[1] * 3, 27, *[1] * 3], dim=1)
    settings = {"rank": 12, "sparse_budget": 24, "value_type": value_type, "refactor_above": refactor_above}
    found = []
    for model in (plain, on_gpu(plain)):
        cache = injected(model, **settings)
        found.append(logits(model, cache, *parts))
        factored = [layer.counted.factored for layer in cache.layers]
        eject(model)
    assert factored == [1 if refactor_above else 3] * LAYERS
    assert relative_error(found[1], found[0]) < tolerance


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("refactor_above", with_slow([0.0, 1.0], slow=[0.0]))
def test_a_later_turn_never_has_the_past_on_the_device(gpu, refactor_above):
    model = on_gpu(llama().to(torch.bfloat16))
    cache = injected(model, **SPARSE, max_seq_len=1024, refactor_above=refactor_above)
    logits(model, cache, random_tokens(PAST))
    live, kept = torch.cuda.memory_allocated(), cache.device_bytes
    torch.cuda.reset_peak_memory_stats()
    logits(model, cache, random_tokens(24, seed=1))
    of_one_layer = 2 * HEADS * DIM * 2 * PAST
    # Growing or rebuilt arrays exist twice in one layer at a time, Recent until the turn has passed: a forward
    # that fails goes back.
    assert torch.cuda.max_memory_allocated() - live < kept / LAYERS + of_one_layer / 4
    assert torch.cuda.memory_allocated() - live < of_one_layer / 4


# What is undone on a CPU: test_shadowkv_cache.py.
@pytest.mark.slow
@pytest.mark.usefixtures("gpu", "in_small_pieces")
def test_factors_that_a_turn_has_replaced_come_back_as_often_as_it_is_undone(monkeypatch):
    """They leave the GPU as others take their place, and are there again when a forward fails or a turn is undone."""
    model = on_gpu(llama())
    # Of so small a rank that which keys a basis was found for is seen.
    settings = {"rank": 4, "sparse_budget": 24, "refactor_above": 0.0}
    first, second, third, last = random_tokens(128).split([68, 27, 32, 1], dim=1)
    expected = []
    for turn in ((last,), (second, last)):
        expected.append(logits(model, injected(model, **settings), first, *turn)[:, 68:])
        eject(model)
    cache = injected(model, **settings)
    logits(model, cache, first)
    untouched, device_bytes = cache.snapshot(), cache.device_bytes
    for turn in (second, third):
        logits(model, cache, turn)
        cache.rollback(untouched)
        # Landmarks have grown into a larger buffer.
        assert cache.device_bytes < 1.02 * device_bytes
    *_, deepest = cache.layers

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deepest, "_take_in", fails)
        with pytest.raises(KeyboardInterrupt):
            logits(model, cache, third)
    fork = cache.fork()
    assert relative_error(logits(model, fork, last), expected[0]) < 1e-5
    assert relative_error(logits(model, cache, second, last), expected[1]) < 1e-5


def test_a_chunk_is_launched_before_the_values_before_have_left(gpu):
    model = on_gpu(llama().to(torch.bfloat16))
    cache = injected(model, **SPARSE)
    logits(model, cache, random_tokens(3))
    cache.reset()
    gpu.record.clear()
    with torch.no_grad():
        model(random_tokens(64).to("cuda"), past_key_values=cache)
    waits = [wait.line for wait in gpu.record.waits]
    # Four chunks; the last is Recent in part, and what is behind the Context stays.
    assert sum(line.startswith("hetero_kv/gpu_ops/write_out") for line in waits) == LAYERS * 4


# Those of a decoded token: test_decode_on_cuda.py.
@pytest.mark.slow
def test_values_that_cannot_be_stored_are_refused_by_name_and_leave_nothing(gpu):
    model = on_gpu(llama())
    cache = injected(model, **SPARSE)
    first, second = random_tokens(140).split([100, 40], dim=1)
    expected = logits(model, cache.fork(), first, second)
    logits(model, cache, first)
    weight = model.model.layers[1].self_attn.wrapped.v_proj.weight
    with torch.no_grad():
        before = weight.clone()
        weight.mul_(1e6)
        with pytest.raises(
            HeteroKVError,
            match=r"a key or value of .* exceeds the range of value_type FP16, whose largest value is 65504",
        ):
            logits(model, cache, second)
        weight.copy_(before)
    assert cache.get_seq_length() == 100
    assert relative_error(logits(model, cache, second), expected[:, 100:]) < 1e-5


# What is undone, above, forks as well.
@pytest.mark.slow
@pytest.mark.usefixtures("in_small_pieces")
def test_a_fork_s_turn_is_its_own(gpu):
    model = on_gpu(llama())
    cache = injected(model, **SPARSE, refactor_above=0.0)
    logits(model, cache, random_tokens(100))
    fork, crop = cache.fork(), cache.fork()
    turns = [random_tokens(30, seed) for seed in (1, 2)]
    theirs = logits(model, fork, turns[0])
    assert relative_error(logits(model, cache, turns[0]), theirs) < 1e-5
    crop.crop(-40)
    assert logits(model, crop, turns[1], random_tokens(1)).isfinite().all()
    assert relative_error(logits(model, fork, turns[1]), logits(model, cache, turns[1])) < 1e-5
