"""A load that does not fit into the memory of an engine, and steps until something is reached."""

from __future__ import annotations

from hetero_kv import SamplingParams
from tests.serving.tiny_engine import PROMPTS

AHEAD = 6
LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)
#: Prompts of 61, 130, 17, 61 and 90 tokens: room for two or three of them, and not for all answers.
LOAD, ROOM = [PROMPTS[index] for index in (1, 2, 4, 5, 6)], 248


def require_all_free(engine):
    for allocator in engine._store.allocators.values():
        assert allocator.free_blocks == allocator.num_blocks


def swapped_requests(engine):
    return [request for request in engine._scheduler.queues.waiting if request.swapped is not None]


def step_until(engine, reached):
    for _ in range(2000):
        if reached():
            return
        assert engine.step()
    raise AssertionError("it was not reached")
