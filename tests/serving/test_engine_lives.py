"""Random lives of requests: they come, are answered, wait on the disk, fail, are cancelled, and leak no block."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero_kv import Engine, HeteroCache, SamplingParams, inject
from hetero_kv.contexts import writing
from hetero_kv.models.loading import LoadedModel
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.serving import memory
from hetero_kv.serving.scheduler import Scheduler
from hetero_kv.serving.stream import Stream
from tests.serving.number_tokenizer import Numbers
from tests.serving.tiny_engine import pause_everywhere
from tests.support.free_rows import FreeRows
from tests.support.tiny_models import tiny_model

#: Two or three requests fit, and not with their longest answers; `AHEAD` tokens are reserved for each.
CAPACITY, KV_TOKENS, LONGEST, AHEAD = 64, 68, 24, 3
_SHAPE = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "head_dim": 16}
_RULES = {
    "rules": [
        {
            "match": {"name": r"layers\.\d+\.self_attn$"},
            "replace": {
                "class": "RetrievalAttention",
                "kwargs": {"representative_type": "QUEST", "representative_num": 2},
            },
        },
        {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
    ],
    "long_context": {
        "block_size": 4,
        "sink_tokens": 4,
        "local_windows_len": 6,
        # Blocks are chosen, and there are no more than that: rounding alone tells rows apart.
        "top_k_blocks": CAPACITY,
        "kv_type": "FP32",
        "chunk_size": 8,
        "max_seq_len": CAPACITY,
        "threads_num": 1,
    },
}
MODEL = tiny_model("llama", **_SHAPE)
inject(MODEL, parse_rules(_RULES))


class Fault(Exception):
    """What is thrown into a forward."""


@dataclass(eq=False)
class Submitted:
    """A request: its prompt, its stream, and whether it was cancelled or its forward failed."""

    tokens: list[int]
    count: int
    stream: Stream
    is_cancelled: bool = False


@cache
def answer_alone(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The likeliest tokens behind a prompt, in a cache of its own."""
    ids = torch.tensor([tokens])
    output = MODEL.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=HeteroCache(MODEL, CAPACITY), do_sample=False,
        max_new_tokens=LONGEST,
    )  # fmt: skip
    return tuple(output[0, len(tokens) :].tolist())


class LivesOfRequests(RuleBasedStateMachine):
    """An engine with little memory, and the requests that it got."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.reserve = patch.object(memory, "AHEAD", AHEAD)
        self.reserve.start()
        self.engine = Engine(
            LoadedModel(MODEL, Numbers(), "tiny", 512), max_seq_len=CAPACITY, max_batch=3, kv_tokens=KV_TOKENS,
            kept_prefixes=2, part=16, speculation="lookup", starts_thread=False,
        )  # fmt: skip
        # Every guess is verified, however long that takes.
        self.engine._speculation.costs = FreeRows()
        self.submitted: list[Submitted] = []
        self.failed: list[Stream] = []
        self.forward = self.engine._scheduler.forward

    @rule(
        seed=st.integers(0, 3), length=st.integers(1, 40), count=st.integers(1, LONGEST), again=st.integers(0, 5),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )  # fmt: skip
    def submit(self, seed: int, length: int, count: int, again: int, priority: int) -> None:
        drawn = torch.randint(2, 97, (40,), generator=torch.Generator().manual_seed(seed)).tolist()[:length]
        if again and self.submitted:
            # Behind the beginning of another request, or its answer.
            other = self.submitted[again % len(self.submitted)]
            known = [*other.tokens, *(piece.token for piece in other.stream._pieces)]
            drawn = [*known[: len(known) * again // 5], *drawn][:40]
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        self.submitted.append(Submitted(drawn, count, self.engine.generate(drawn, params, priority=priority)))

    @rule(steps=st.integers(1, 12))
    def compute(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.submitted)
    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        request = self.submitted[which % len(self.submitted)]
        request.is_cancelled = True
        request.stream.cancel()

    @rule(kind=st.sampled_from(["prefill", "decode", "mixed", "verify"]), late=st.booleans())
    def fail(self, kind: str, late: bool) -> None:
        """The forwards of one kind fail in the next step, before or behind the model; rows fail if they do alone."""
        forward = self.forward
        compute, logits = getattr(type(forward), kind), type(forward)._logits

        def failing(cache: HeteroCache, token_ids: torch.Tensor) -> torch.Tensor:
            if late:
                logits(forward, cache, token_ids)
            raise Fault

        def fails(*arguments: Any) -> torch.Tensor:
            forward._logits = failing
            try:
                return compute(forward, *arguments)
            finally:
                del forward._logits

        setattr(forward, kind, fails)
        try:
            self.step_and_note_failures()
        finally:
            delattr(forward, kind)

    @rule(steps=st.integers(1, 12))
    def fill_the_disk(self, steps: int) -> None:
        """No file can be written for some steps."""
        with patch.object(writing, "write_tensors", side_effect=OSError(errno.ENOSPC, "no space")):
            for _ in range(steps):
                self.step_and_note_failures()

    def step_and_note_failures(self) -> None:
        before = {id(each.stream) for each in self.submitted if each.stream._error is not None}
        self.engine.step()
        self.failed += [each.stream for each in self.submitted if each.stream._error and id(each.stream) not in before]

    @invariant()
    def no_answer_is_another(self) -> None:
        for request in self.submitted:
            if request.stream._error is not None:
                error = request.stream._error
                assert isinstance(error, Fault) or "no space" in str(error)
                assert request.stream in self.failed
            tokens = tuple(piece.token for piece in request.stream._pieces)
            assert tokens == answer_alone(tuple(request.tokens))[: len(tokens)]
            completion = request.stream._completion
            if completion is not None and not request.is_cancelled:
                assert len(tokens) == request.count

    @invariant()
    def every_block_has_its_owners(self) -> None:
        scheduler = self.engine._scheduler
        caches = [request.cache for request in scheduler.queues.all if request.cache is not None]
        caches += self.engine._prefixes.caches
        for layout, allocator in self.engine._store.allocators.items():
            tables = [sequence.tables[layout].ids for cache in caches for sequence in cache.sequences]
            used = {int(block) for ids in tables for block in ids}
            assert allocator.num_blocks - allocator.free_blocks == len(used)
            for block in used:
                assert allocator.references(block) == sum(block in ids for ids in tables)

    @invariant()
    def every_file_has_its_request(self) -> None:
        waiting = [request.swapped for request in self.engine._scheduler.queues.all if request.swapped is not None]
        folder = self.engine._swaps._folder
        assert {swapped.path for swapped in waiting} == set(() if folder is None else folder.iterdir())

    def teardown(self) -> None:
        self.reserve.stop()
        while self.engine.step():
            pass
        assert all(request.stream.is_done for request in self.submitted)
        self.no_answer_is_another()
        self.engine.close()


class LivesBetweenChunks(LivesOfRequests):
    """The same while prompts pause for others wherever they can."""

    def __init__(self) -> None:
        super().__init__()
        pause_everywhere(self.engine)
        # Parts of prompts are large from so many tokens on.
        self.small = patch.object(Scheduler, "_small", 4)
        self.small.start()

    def teardown(self) -> None:
        super().teardown()
        self.small.stop()


def test_guesses_leave_blocks_to_a_prompt_in_progress():
    # The second answer quotes the first one's prompt, and its guesses would take the last blocks, which cannot be
    # freed: no file can be written.
    lives = LivesBetweenChunks()
    lives.compute(steps=1)
    lives.submit(again=0, count=1, length=40, priority=0, seed=2)
    lives.submit(again=3, count=1, length=13, priority=-1, seed=0)
    lives.submit(again=2, count=14, length=1, priority=-1, seed=1)
    lives.fill_the_disk(steps=5)
    lives.no_answer_is_another()
    lives.every_block_has_its_owners()
    lives.teardown()


def machine(lives: type[LivesOfRequests], runs: int, steps: int) -> type:
    case = lives.TestCase
    return type("Lives", (case,), {"settings": settings(max_examples=runs, stateful_step_count=steps, deadline=None)})


TestLivesOfRequests = machine(LivesOfRequests, 3, 20)
TestLivesOfRequests.__doc__ = "Some lives in every run of the suite."
TestLivesBetweenChunks = machine(LivesBetweenChunks, 3, 20)
TestManyLivesOfRequests = pytest.mark.slow(machine(LivesOfRequests, 1000, 30))
TestManyLivesBetweenChunks = pytest.mark.slow(machine(LivesBetweenChunks, 1000, 30))
