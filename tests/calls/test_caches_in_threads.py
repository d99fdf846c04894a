"""Threads: a cache serves one thread at a time; caches of one model, and models, serve several at once."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from hetero_kv import HeteroCache, HeteroKVError, inject
from hetero_kv.engine.errors import CacheInUseError
from tests.calls.reference_model import EVERYTHING, PROMPT, SIZES
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "kv_type": "FP32"}
#: Rules that choose few of the tokens: what is chosen shows in the answer.
RULES = {
    "quest": {**SMALL, "top_k_blocks": 2},
    "infinigen": {**SMALL, "token_budget": 4},
    "loki": {**SMALL, "token_budget": 6},
    "shadowkv": {"rank": 8, "sparse_budget": 16, "chunk_size": 8},
    "self_extend": {},
    "h2o": {"budget": 24},
    "streaming_llm": {"budget": 24},
}
LONG = torch.randint(6, 250, (4, 90), generator=torch.Generator().manual_seed(8))


def injected(rules="quest", settings=EVERYTHING, seed=1):
    model = tiny_model("llama", seed, **SIZES)
    inject(model, rules, command_line=settings)
    return model


def answer(model, row, cache=None, **settings):
    cache = HeteroCache(model, 200) if cache is None else cache
    ids = LONG[row : row + 1, : 60 + 5 * row]
    return model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=10, **settings).tolist()


class Pausing(BaseStreamer):
    """Lets others know that a token is there, and waits until it may go on."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def put(self, value):
        self.reached.set()
        assert self.go_on.wait(60)

    def end(self):
        pass


@pytest.fixture
def often_switched():
    """Threads are switched after every few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def model():
    return injected()


@pytest.mark.parametrize(
    "rules", with_slow(list(RULES), slow=("h2o", "infinigen", "loki", "shadowkv", "self_extend", "streaming_llm"))
)
def test_caches_of_one_model_in_several_threads_answer_as_one_after_the_other(rules, often_switched):
    model = injected(rules, RULES[rules])
    rows = range(len(LONG))
    expected = [answer(model, row) for row in rows]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda row: answer(model, row), [*rows, *rows])) == [*expected, *expected]


def test_several_models_in_several_threads_answer_as_one_after_the_other():
    models = [injected(seed=seed) for seed in range(3)]
    expected = [answer(model, row) for model in models for row in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda model: [answer(model, row) for row in range(3)], models)
        assert [each for of_model in found for each in of_model] == expected


def test_forks_in_several_threads_answer_as_one_after_the_other(model):
    prompt = HeteroCache(model, 200, forks=4)
    with torch.no_grad():
        model(LONG[:1, :40], past_key_values=prompt)

    # The prompt's cache is one thread's at a time too.
    lock = threading.Lock()

    def forked(row):
        with lock:
            fork = prompt.fork()
        ids = torch.cat([LONG[:1, :40], LONG[row : row + 1, :20]], dim=1)
        tokens = model.generate(ids, past_key_values=fork, do_sample=False, max_new_tokens=6).tolist()
        fork.reset()
        return tokens

    rows = [1, 2, 3]
    expected = [forked(row) for row in rows]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(forked, rows)) == expected


#: What a second thread tries with a cache that another one generates into.
SECOND = {
    "generate": lambda model, cache: answer(model, 1, cache),
    "a forward": lambda model, cache: model(PROMPT[:, :1], past_key_values=cache),
    "crop": lambda model, cache: cache.crop(-1),
    "select": lambda model, cache: cache.select([0]),
    "reset": lambda model, cache: cache.reset(),
    "fork": lambda model, cache: cache.fork(),
    "extend": lambda model, cache: HeteroCache(model, 200).extend(cache),
    "save": lambda model, cache: cache.save("nowhere.safetensors"),
}


@pytest.mark.parametrize("way", SECOND)
def test_a_second_thread_is_told_that_the_cache_is_in_use_and_the_first_goes_on(model, way):
    expected = answer(model, 0)
    cache, pausing = HeteroCache(model, 200), Pausing()
    with ThreadPoolExecutor(1, thread_name_prefix="answering") as pool:
        first = pool.submit(answer, model, 0, cache, streamer=pausing)
        assert pausing.reached.wait(60)
        try:
            with pytest.raises(CacheInUseError, match=r"in use by another thread \(answering_0\); give each thread"):
                SECOND[way](model, cache)
        finally:
            pausing.go_on.set()
        assert first.result(60) == expected
    # It is free again.
    assert cache.get_seq_length() == 69
    cache.crop(-9)


def test_a_forward_that_fails_leaves_the_cache_and_the_model_to_other_threads(model):
    cache = HeteroCache(model, 200)
    with pytest.raises(HeteroKVError, match="max_seq_len"):
        model(torch.randint(6, 250, (1, 300)), past_key_values=cache)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answer, model, 0, cache).result(60) == answer(model, 0)


def test_an_untouched_model_in_another_thread_does_not_reach_the_cache_of_a_running_answer(model):
    untouched = tiny_model("llama", 1, **SIZES)
    cache, pausing = HeteroCache(model, 200), Pausing()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(answer, model, 0, cache, streamer=pausing)
        assert pausing.reached.wait(60)
        try:
            with pytest.raises(HeteroKVError, match="passed to a model without its rules"):
                untouched(PROMPT, past_key_values=cache)
        finally:
            pausing.go_on.set()
        assert first.result(60) == answer(model, 0)
