"""The planned memory of sparse speculation's mean keys, compared with the tensors."""

from __future__ import annotations

import pytest

from hetero_kv import HeteroCache
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.families.retrieval import draft_attention
from hetero_kv.planning.common_plan import CommonPlan
from hetero_kv.planning.plan import Footprint
from hetero_kv.serving.speculation.opening import open_speculation
from tests.serving.number_tokenizer import Numbers
from tests.serving.test_speculation import prefilled
from tests.serving.tiny_engine import PROMPTS, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """Blocks of some 200 tokens have mean keys."""
    monkeypatch.setattr(draft_attention, "NEWEST", 12)
    monkeypatch.setattr(draft_attention, "CHOSEN", 16)


def mean_keys(engine, tokens):
    """Bytes of the mean keys that a guess after these tokens computes."""
    forward, cache, _ = prefilled(engine, tokens)
    few = DraftBlocks()
    with forward.guessing([cache]):
        forward.guess([cache], [3], [few])
    return few.dram_bytes


@pytest.mark.parametrize(
    ("recipe", "architecture"), [("dense", "llama"), ("adaptive", "llama"), ("dense", "gemma3_text")]
)
def test_the_plan_is_what_the_tensors_take(recipe, architecture):
    with engine_of(recipe, architecture, speculation="sparse") as engine:
        footprint = Footprint.of(engine._scheduler.forward.model.hetero_kv_injection)
        taken = [mean_keys(engine, tokens) for tokens in PROMPTS]
        assert taken == [footprint.memory(len(tokens)).mean_keys for tokens in PROMPTS]
        assert taken[0] == 0 < taken[1] < taken[3]
        assert footprint.memory(200, batch=3, forks=1).mean_keys == 6 * taken[3]


def test_sequences_that_share_a_store_take_no_more_than_is_planned():
    with engine_of("dense", speculation="sparse") as engine:
        plan = CommonPlan.of(engine._scheduler.forward.model.hetero_kv_injection, batch=2)
        taken = {len(tokens): mean_keys(engine, tokens) for tokens in PROMPTS}
        for lengths in ((200, 5), (61, 130), (90, 33)):
            spare = plan.memory(sum(lengths)).mean_keys - sum(taken[each] for each in lengths)
            # What the newest blocks of one of them would take, and the parts of blocks together.
            assert 0 <= spare <= taken[200] / 23 * 3


def test_stores_are_planned_with_mean_keys_where_speculation_is_sparse():
    with engine_of("dense") as without, engine_of("dense", speculation="sparse") as engine:
        model = engine._scheduler.forward.model
        footprint = Footprint.of(model.hetero_kv_injection)
        means = footprint.memory(engine._store.tokens).mean_keys
        assert engine._store.tokens == without._store.tokens
        assert engine._store.planned - without._store.planned == means > 0
    with engine_of("dense") as engine:
        model = engine._scheduler.forward.model
        before = HeteroCache(model).groups[0].store.planned
        open_speculation(engine._scheduler.forward, Numbers(), "sparse")
        store = HeteroCache(model).groups[0].store
        assert store.planned - before == footprint.memory(store.capacity).mean_keys > 0


def test_nothing_is_planned_where_speculation_is_off():
    with engine_of("sparq", speculation="sparse") as engine:
        assert engine.speculation == "off"
        assert Footprint.of(engine._scheduler.forward.model.hetero_kv_injection).memory(400).mean_keys == 0
