"""Memory that runs out half-way is an OutOfMemoryError that says what fits, and the conversation continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero_kv import cli
from hetero_kv.commands import methods
from hetero_kv.errors import OutOfMemoryError
from hetero_kv.operators import RetrievalAttention
from hetero_kv.planning import plan
from tests.engine.faults import NO_MEMORY
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model

CHECKOUT = Path(__file__).parents[2]
ERRORS = {
    "python": (MemoryError(), r"\(MemoryError\)"),
    "numpy": (MemoryError("Unable to allocate 1.00 TiB for an array"), r"\(MemoryError: Unable to allocate 1.00 TiB"),
    "torch": (
        RuntimeError(NO_MEMORY + "\nframe #0: " + "x" * 9000),
        r"can't allocate memory: you tried to allocate 64\)",
    ),
    "cuda": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), r"CUDA out of memory"),
    "cublas": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), "CUBLAS_STATUS_ALLOC_FAILED"),
    "c++": (RuntimeError("std::bad_alloc"), "bad_alloc"),
}


def tokens(count, seed=0):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def conversation():
    """A model, and a cache that holds forty tokens."""
    model = tiny_model("llama")
    cache = injected(model, small_recipe("quest"))
    with torch.no_grad():
        model(tokens(40), past_key_values=cache)
    return model, cache


def raising(error):
    def raised(*_args, **_kwargs):
        raise error

    return raised


@pytest.mark.parametrize("kind", ERRORS)
def test_every_kind_of_it_is_one_error_and_nothing_has_changed(conversation, monkeypatch, kind):
    error, said = ERRORS[kind]
    model, cache = conversation
    monkeypatch.setattr(RetrievalAttention, "end_prefill", raising(error))
    with pytest.raises(OutOfMemoryError, match=said) as refused:
        model(tokens(9, 1), past_key_values=cache)
    assert "none of 9 tokens was added to the 40 stored ones; free is " in str(refused.value)
    assert "set chunk_size to less than 64" in str(refused.value)
    assert len(str(refused.value)) < 700
    # It would hold all that the forward had allocated.
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None
    assert cache.get_seq_length() == 40


def test_other_errors_are_unchanged(conversation, monkeypatch):
    model, cache = conversation
    monkeypatch.setattr(RetrievalAttention, "end_prefill", raising(RuntimeError("a kernel failed")))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        model(tokens(9, 1), past_key_values=cache)
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize(
    ("length", "advised"),
    [
        (40 + 9, r"which suffices by the plan.*: try again"),
        (40 + 5, r"shorten the input to about \d tokens, or set max_seq_len to 4\d"),
        (20, "no more tokens fit: begin a new conversation"),
        (500, r"blocks for max_seq_len 1024 need more: set max_seq_len to \d{3}"),
    ],
)
def test_it_says_what_fits_into_the_memory_that_is_free(conversation, monkeypatch, length, advised):
    model, cache = conversation
    now = plan.Plan.of(model.hetero_kv_injection)
    needed = now.dram_needed(length) / (1 - plan.RESERVE) - cache.dram_bytes
    capacity = 1024 if length == 500 else length
    monkeypatch.setattr(type(cache), "max_seq_len", property(lambda self: capacity))
    monkeypatch.setattr(plan, "free_dram", lambda: int(needed) + 64)
    monkeypatch.setattr(RetrievalAttention, "end_prefill", raising(MemoryError()))
    with pytest.raises(OutOfMemoryError, match=advised):
        model(tokens(9, 1), past_key_values=cache)


def test_where_planning_finds_no_memory_either_it_says_so(conversation, monkeypatch):
    model, cache = conversation
    monkeypatch.setattr(plan, "free_dram", raising(MemoryError()))
    monkeypatch.setattr(RetrievalAttention, "end_prefill", raising(MemoryError()))
    with pytest.raises(OutOfMemoryError, match="free is too little to plan a length that fits"):
        model(tokens(9, 1), past_key_values=cache)


def test_a_command_that_runs_out_of_it_ends_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr(methods, "run", raising(RuntimeError(NO_MEMORY)))
    assert cli.main(["methods"]) == cli.USER_ERROR
    assert "error: memory ran out (RuntimeError: [enforce fail" in capsys.readouterr().err


# Memory that really runs out, in a process of its own; the tests above raise what torch and numpy do then.
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="an address space is limited on Linux")
def test_under_a_limit_a_conversation_is_told_and_goes_on_bit_for_bit():
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    script = Path(__file__).with_name("limited_memory.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    blocks, activations = seen["said"]
    assert "Unable to allocate" in blocks
    assert "blocks for max_seq_len 400000 need more: set max_seq_len to " in blocks
    assert "DefaultCPUAllocator: can't allocate memory" in activations
    assert "none of 60000 tokens was added to the 40 stored ones" in activations
    assert seen["same"] == [True, True]
    assert seen["length"] + seen["room"] == 400_000
