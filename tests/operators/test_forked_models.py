"""Forked caches in whole models: each fork answers as if it were alone."""

from __future__ import annotations

import copy

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.engine.rollback import rollback_on_error
from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.rules.rule_file import parse_rules
from tests.support.devices import CPU, device_called, model_on, on_both
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "block_size": 4,
    "local_windows_len": 8,
    "sink_tokens": 4,
    "chunk_size": 16,
    "max_seq_len": 256,
    "threads_num": 1,
}
RETRIEVAL = [
    {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
    {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
]
LEFT_ALONE = [{"match": {"name": r"layers\.1\.self_attn$"}, "replace": {"class": "default"}}, *RETRIEVAL]
CASES = {
    "mean": ("llama", RETRIEVAL, {"representative_type": "MEAN"}),
    "quest": ("llama", RETRIEVAL, {"representative_type": "QUEST", "representative_num": 2}),
    "dynamic": ("llama", RETRIEVAL, {"representative_type": "DYNAMIC"}),
    "reused selections": ("llama", RETRIEVAL, {"representative_type": "MEAN", "layer_step": 2, "token_step": 3}),
    "preselection": (
        "llama",
        RETRIEVAL,
        {"representative_type": "MEAN", "preselect_block": True, "preselect_block_count": 5},
    ),
    "windows": ("gemma3_text", RETRIEVAL, {"representative_type": "MEAN"}),
    "a layer left alone": ("llama", LEFT_ALONE, {"representative_type": "DYNAMIC"}),
    "a window left alone": (
        "gemma3_text",
        [{"match": {"name": r"layers\.[01]\.self_attn$"}, "replace": {"class": "default"}}, *RETRIEVAL],
        {"representative_type": "MEAN"},
    ),
}


def random_tokens(count, seed):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


def turn(seed, question=6):
    """A question, and an answer token by token: together they are longer than Local."""
    return [random_tokens(question, seed), *random_tokens(5, seed + 100).split(1, dim=1)]


def logits(model, cache, parts):
    with torch.no_grad():
        return torch.cat([model(part.to(model.device), past_key_values=cache).logits.cpu() for part in parts], dim=1)


def injected(case, device=CPU):
    architecture, rules, settings = CASES[case]
    model = model_on(device, tiny_model(architecture))
    inject(model, parse_rules({"rules": rules, "long_context": {**SMALL, "top_k_blocks": 3, **settings}}))
    return model


def prompted(model, **settings):
    """A cache that holds a first turn, of 61 + 5 tokens."""
    cache = HeteroCache(model, **settings)
    logits(model, cache, turn(0, 61))
    return cache


def alone(model, *seeds):
    """The logits of the last of these turns in a cache that was never forked."""
    cache = prompted(model)
    return [logits(model, cache, turn(seed)) for seed in seeds][-1]


@pytest.mark.parametrize(
    ("case", "device"),
    on_both(CASES, slow=CASES.keys() - {"windows"}),
    indirect=["device"],
)
def test_forks_that_go_on_by_turns_answer_as_if_each_were_alone(case, device):
    assert_forks_answer_as_if_each_were_alone(injected(case, device), forks=0)


# Forks that share the room of one go the same ways above.
@pytest.mark.slow
def test_forks_that_have_room_of_their_own_answer_as_if_each_were_alone():
    assert_forks_answer_as_if_each_were_alone(injected("dynamic"), forks=2)


def assert_forks_answer_as_if_each_were_alone(model, forks):
    first = prompted(model, forks=forks)
    second, third = first.fork(), copy.deepcopy(first)
    answers = [[], [], []]
    for parts in zip(*(turn(seed) for seed in (11, 12, 13)), strict=True):
        for answer, cache, part in zip(answers, (first, second, third), parts, strict=True):
            answer.append(logits(model, cache, [part]))
    for answer, seed in zip(answers, (11, 12, 13), strict=True):
        assert torch.equal(torch.cat(answer, dim=1), alone(model, seed))
    second.reset()
    fourth = third.fork()
    del third
    assert torch.equal(logits(model, fourth, turn(22)), alone(model, 13, 22))
    assert torch.equal(logits(model, first, turn(21)), alone(model, 11, 21))
    assert second.get_seq_length() == 0


@pytest.mark.parametrize("where", ["mirrored", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.slow])])
def test_forks_with_a_window_on_the_compute_device_answer_as_if_each_were_alone(where, monkeypatch):
    if where == "mirrored":
        monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: True)
    with device_called("cpu" if where == "mirrored" else where) as device:
        model = injected("mean", device)
        first = prompted(model)
        second = first.fork()
        for token in random_tokens(5, 1).split(1, dim=1):
            logits(model, first, [token])
            logits(model, second, [token + 1])
        third = prompted(model)
        for token in random_tokens(5, 1).split(1, dim=1):
            logits(model, third, [token + 1])
        assert torch.equal(logits(model, second, [random_tokens(1, 2)]), logits(model, third, [random_tokens(1, 2)]))


def test_a_failed_turn_of_one_fork_is_undone_without_a_trace_in_the_other():
    model = injected("dynamic")
    first = prompted(model)
    second = first.fork()

    def failing_turn():
        with rollback_on_error(first):
            logits(model, first, turn(11))
            raise KeyError

    with pytest.raises(KeyError):
        failing_turn()
    assert torch.equal(logits(model, second, turn(12)), alone(model, 12))
    assert first.get_seq_length() == 61 + 5
    assert torch.equal(logits(model, first, turn(12)), alone(model, 12))


@pytest.mark.parametrize("case", ["mean", "dynamic"])
def test_a_shared_prefix_lies_in_memory_once(case):
    model = injected(case)
    first = prompted(model)
    block = sum(layer.pool.bytes_per_block for layer in first.layers)
    before = first.dram_bytes
    assert before == 17 * block
    second = first.fork()
    assert second.dram_bytes == before
    assert second.shared_bytes == before
    logits(model, second, turn(12))
    # 11 tokens more, the first of them in a copy of the last block; what was in Local is copied for DYNAMIC only.
    copied = {"mean": 1, "dynamic": 3}[case]
    assert first.dram_bytes == before + (3 + copied) * block
    assert second.shared_bytes == before - copied * block
