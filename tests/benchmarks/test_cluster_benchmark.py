"""The trace that routers are compared on, and what is made of its answers."""

from __future__ import annotations

import pytest

from benchmarks import report
from benchmarks.cluster import put
from benchmarks.http_clients import TimedAnswer
from benchmarks.measured_cluster import replay, trace
from benchmarks.measured_cluster.replay import Outcome


def test_the_recorded_trace_is_the_one_that_is_drawn(tmp_path):
    recorded = trace.read(trace.RECORDED)
    assert recorded == trace.drawn()
    trace.written(recorded, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == trace.RECORDED.read_text()
    counts = [sum(each.document == number for each in recorded) for number in range(24)]
    assert counts[0] == max(counts)


def test_a_row_has_hits_times_balance_and_prefills():
    answers = [
        (3, 0, TimedAnswer(0.0, [2.0], prompt_tokens=100, cached_tokens=0)),
        (3, 1, TimedAnswer(0.0, [0.5], prompt_tokens=120, cached_tokens=110)),
        (4, 0, TimedAnswer(0.0, [1.0], prompt_tokens=180, cached_tokens=20)),
    ]
    row = Outcome(answers, {3: 90, 4: 170}, 30.4, [12.0, 8.0]).row("some")
    assert dict(zip(replay.COLUMNS, row, strict=True)) == {
        "router": "some",
        "tokens from memory or store": "32.5 %",
        "first token, median": "1.00 s",
        "99th percentile": "1.98 s",
        "largest load / mean": "1.20",
        "prefills per document": "1.00",
        "whole trace": "30 s",
    }


@pytest.mark.parametrize("again", ["same", "other"])
def test_a_measurement_supersedes_the_one_of_its_title(again, tmp_path):
    path = tmp_path / "found.json"
    put(path, "same", ("router", "hits"), [["ours", "90 %"]])
    put(path, again, ("router", "hits"), [["ours", "91 %"]])
    new, old = report.load("found", tmp_path).measurements
    assert (new.status, new.rows) == ("current", [["ours", "91 %"]])
    assert old.status == ("superseded" if again == "same" else "current")
