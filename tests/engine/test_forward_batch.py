"""A forward batch: what a forward is, by its kind, and that none outlives its forward."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.engine.forward_batch import ForwardBatch, ForwardKind
from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.forward import ModelForward, Part
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

PROMPT = list(range(2, 42))


@pytest.fixture(scope="module")
def forward():
    model = tiny_model("llama")
    inject(model, small_recipe("quest"), command_line={"max_seq_len": 256, "kv_type": "FP32"})
    return ModelForward(model)


@pytest.fixture
def batches(monkeypatch):
    """The batches of all forwards."""
    found, end = [], ForwardBatch.end
    monkeypatch.setattr(ForwardBatch, "end", lambda batch: (found.append(batch), end(batch))[1])
    return found


def prefilled(forward, tokens):
    cache = HeteroCache(forward.model)
    forward.prompt(cache, PROMPT[:tokens], question=3)
    return cache


def test_a_prompt_passes_with_its_question_and_the_logits_that_are_read(forward, batches):
    cache = prefilled(forward, 20)
    (batch,) = batches
    assert batch.kind is ForwardKind.PREFILL
    assert (batch.request.question, batch.request.logits_to_keep, batch.positions) == (3, 1, [0])
    assert cache.batch is None
    assert cache.request.question is None


def test_a_part_of_a_prompt_is_neither_its_first_nor_its_last_one(forward, batches):
    cache = HeteroCache(forward.model)
    for start, stop in ((0, 10), (10, 30), (30, 40)):
        forward.prefill(cache, Part(PROMPT, start, stop, 0, None))
    parts = [batch.steps[0].part for batch in batches]
    assert [(part.is_first, part.is_last) for part in parts] == [(True, False), (False, False), (False, True)]
    assert [batch.positions for batch in batches] == [[0], [10], [30]]


def test_decoded_tokens_of_several_lengths_have_their_own_positions(forward, batches):
    caches = [prefilled(forward, 20), prefilled(forward, 30)]
    forward.decode(caches, [5, 6])
    batch = batches[-1]
    assert (batch.kind, batch.positions, len(batch.steps)) == (ForwardKind.DECODE, [20, 30], 2)


def test_a_part_of_a_prompt_and_decoded_tokens_have_one_row_per_token(forward, batches):
    caches, prompt = [prefilled(forward, 20), prefilled(forward, 30)], HeteroCache(forward.model)
    forward.mixed(caches, [5, 6], [(prompt, Part(PROMPT, 0, 4, 0, None))])
    batch = batches[-1]
    assert batch.kind is ForwardKind.MIXED
    assert batch.positions == [20, 30, 0, 1, 2, 3]
    assert batch.kept_rows == [0, 1, 5]


def test_each_drafted_token_is_a_step_at_its_own_position(forward, batches):
    caches = [prefilled(forward, 20), prefilled(forward, 30)]
    forward.verify(caches, [[5, 6, 7], [8]])
    batch = batches[-1]
    assert batch.kind is ForwardKind.VERIFY
    assert batch.positions == [20, 21, 22, 30]
    assert batch.kept_rows == [0, 1, 2, 3]


def test_a_forward_that_fails_leaves_no_batch(forward, monkeypatch):
    cache = prefilled(forward, 20)
    with monkeypatch.context() as patched:
        patched.setattr(ForwardBatch, "end", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward.decode([cache], [5])
    assert cache.batch is None
    assert cache.lengths == [20]
    forward.decode([cache], [5])


def test_a_layer_that_is_called_outside_of_a_forward_says_so(forward):
    cache, layer = prefilled(forward, 20), forward.model.model.layers[0]
    with pytest.raises(HeteroKVError, match="a part that was called alone"):
        layer(torch.zeros(1, 1, 64), past_key_values=cache)


def test_the_layers_of_a_cache_are_not_replaced(forward):
    with pytest.raises(HeteroKVError, match="belong to its groups"):
        HeteroCache(forward.model).layers = []
