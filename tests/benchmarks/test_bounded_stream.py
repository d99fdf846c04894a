"""`python -m benchmarks.bounded_stream`: its figures on a tiny model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import bounded_stream
from benchmarks.bounded_stream import PARTS, StreamPrefill, StreamSubject
from hetero_kv import HeteroKVError
from hetero_kv.adapter.strided_prefill import StridedForward
from hetero_kv.evals.config_spec import config_specs
from hetero_kv.families.bounded.layer import BoundedLayer
from tests.support.tiny_models import tiny_model

STRIDED = [
    "streaming_llm:budget=24:stride=8",
    "cascade:budget=24:stride=16:sink_tokens=4",
    "tova:budget=24:stride=8",
    "infinipot:budget=24:catalyst=abc",
    "sirllm:budget=24:stride=8",
]


class Letters:
    """A tokenizer of one token per letter."""

    def encode(self, text, add_special_tokens):
        return [ord(letter) - 90 for letter in text]


@pytest.fixture
def subject():
    return StreamSubject(tiny_model("llama"), Letters())


def test_every_strided_recipe_has_its_costs_and_the_parts_that_its_policy_needs(subject):
    found = bounded_stream.cost(subject, config_specs(STRIDED), [32, 96], repeats=1, steps=4)
    rows = {name.split(":")[0]: row for name, row in found["recipes"].items()}
    assert list(rows) == bounded_stream.RECIPES.split(",")
    for name, row in rows.items():
        assert row["decode_ms"] > 0
        assert all(ms > 0 for ms in row["prefill_ms_per_token"])
        assert 0 < sum(row["prefill_shares"].values()) < 1
        assert row["decode_entries"] == (24 - 6 if name == "infinipot" else 24)
    shares = {part: {name for name, row in rows.items() if row["prefill_shares"][part]} for part in PARTS}
    assert shares["logits"] == {"infinipot", "sirllm"}
    assert shares["catalyst"] == {"infinipot"}


def test_time_within_a_part_is_counted_once_and_the_functions_are_put_back(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(bounded_stream, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(BoundedLayer, "begin_turn", lambda layer: None)
    monkeypatch.setattr(StridedForward, "run_transient", lambda layer: layer.begin_turn())
    before = StridedForward.run_transient, BoundedLayer.begin_turn
    layer = object.__new__(BoundedLayer)
    with bounded_stream.spent() as parts:
        StridedForward.run_transient(layer)
        layer.begin_turn()
        layer.begin_turn()
    assert parts == {"update": 2, "scores": 0, "logits": 0, "catalyst": 1}
    assert before == (StridedForward.run_transient, BoundedLayer.begin_turn)


def test_time_within_a_prompt_is_read_between_the_stamps():
    assert bounded_stream._time_at(15, [(0, 0.0), (10, 2.0), (20, 4.0)]) == 3.0


def test_a_recipe_whose_prompts_pass_whole_is_refused(subject):
    with pytest.raises(HeteroKVError, match=r"recipe h2o: its prompts do not pass in strides"):
        StreamPrefill(subject, config_specs(["h2o"])[0], 16, 8)()
