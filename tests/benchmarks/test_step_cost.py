"""`python -m benchmarks.step_cost`: its measurements on two layers, ratios and goals."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.step_cost import (
    BEFORE,
    BLOCK,
    LAYERS,
    NOW,
    RECIPES,
    ROOT,
    Worker,
    checked_out,
    measure,
    missed,
    ratio,
    tables,
)
from benchmarks.step_cost_profile import KERNELS, MODEL, Attribution


@pytest.fixture(scope="module")
def with_itself():
    """`quest` in this tree against the same tree."""
    with Worker(ROOT, layers=2) as before, Worker(ROOT, layers=2) as now:
        # Alone, so that the other finds the kernels compiled.
        before.ask("inject", recipe="quest", settings=RECIPES["quest"][1], prompt=300)
        before.ask("burst", tokens=BLOCK)
        return measure({BEFORE: before, NOW: now}, "quest", rounds=2, prompt=300)


@pytest.mark.slow
def test_host_time_excludes_the_model_and_the_kernels(with_itself):
    for tree in (BEFORE, NOW):
        ms = with_itself[tree]["ms_per_token"]
        assert min(ms["kernels"], ms["untouched"], ms["host"]) > 0
        assert ms["kernels"] + ms["untouched"] < ms["total"]
    assert with_itself["ratio"]["median"] > 0


@pytest.mark.slow
def test_a_tree_compared_with_itself_enters_the_same_frames(with_itself):
    assert with_itself[BEFORE]["frames"] == with_itself[NOW]["frames"]


@pytest.mark.slow
def test_every_frame_of_ours_has_a_name_and_is_within_a_layer_or_outside(with_itself):
    frames = with_itself[NOW]["frames"]
    assert len(frames["per_token"]) == BLOCK
    assert sum(frames["per_token"]) == sum(frames["calls"].values()) * BLOCK
    assert all(0 < outside < ours for ours, outside in zip(frames["per_token"], frames["outside_layers"], strict=True))
    # Both layers of `quest` are dense here, in which every token does the same but those at the edges of a block, and
    # the one at which the counts of many become statistics.
    usual = max(frames["per_token"], key=frames["per_token"].count)
    assert sum(count != usual for count in frames["per_token"]) <= 3
    assert any(name.endswith("RetrievalStep.__call__") for name in frames["calls"])


@pytest.mark.slow
def test_the_profiler_gives_time_to_the_model_to_kernels_and_to_what_every_token_calls(with_itself):
    spent = with_itself[NOW]["profiled_ms_per_token"]
    assert spent["(model)"] > 0
    # Less often than once per token are those that see new shapes for the first time; what `dataclass` wrote is in no
    # file, and its time is its caller's; counts become statistics at one token in 64.
    calls = with_itself[NOW]["frames"]["calls"].items()
    elsewhere = "__create_fn__", "StepTallies.plus"
    called = {name for name, number in calls if number >= 1 and not any(map(name.count, elsewhere))}
    assert {"(kernels)", *called} <= set(spent)


@pytest.mark.slow
def test_the_tables_have_a_row_for_the_recipe_and_for_what_it_calls(with_itself):
    time, frames, calls = tables([with_itself], "HEAD", calls=True)
    assert (time.row_count, frames.row_count) == (1, 1)
    assert calls.row_count > len(with_itself[NOW]["frames"]["calls"])


@pytest.mark.slow
def test_a_package_from_elsewhere_is_not_measured(tmp_path):
    with pytest.raises(RuntimeError, match=r"ended with exit status 1"), Worker(tmp_path, layers=2) as worker:
        worker.ask("burst", tokens=1)


def _loop(steps):
    return sum(range(steps))


def _calls_of_ours():
    # What `sorted` takes is its caller's, what the kernel takes is not.
    return sorted(range(3), key=lambda _: _loop(10_000))


def test_time_counts_for_our_innermost_function():
    attribution = Attribution((str(Path(__file__).parent),), kernels=_loop.__code__)
    with attribution.profile:
        _calls_of_ours()
    spent = attribution.seconds(plain=1.0)
    assert sum(spent.values()) == pytest.approx(1.0)
    assert {MODEL, KERNELS, "test_step_cost: _calls_of_ours"} <= set(spent)


def test_the_ratio_is_the_median_of_neighbours_whatever_the_machine_did_in_between():
    found = ratio([2.0, 4.0, 60.0], [1.0, 1.0, 60.0])
    assert found == {"median": 0.5, "lower": 0.25, "upper": 1.0, "of_medians": 0.25}
    assert set(ratio([4.0], [1.0]).values()) == {0.25}


@pytest.mark.parametrize(
    ("family", "median", "frames", "goals"),
    [
        ("retrieval", 0.5, 25 * LAYERS, []),
        ("retrieval", 0.51, 25 * LAYERS, ["time"]),
        ("retrieval", 0.5, 25 * LAYERS + 1, ["frames"]),
        ("bounded", 0.5, 99 * LAYERS, []),
    ],
)
def test_goals_are_half_the_time_and_for_retrieval_25_frames(family, median, frames, goals):
    row = {"family": family, "ratio": {"median": median}, NOW: {"frames": {"per_token": [1, frames, 9999]}}}
    assert missed(row) == goals


def test_a_commit_is_checked_out_for_a_while(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True)

    git("init", "--quiet")
    for text in ("before", "now"):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "--quiet", "--message", text)
    with checked_out("HEAD~1", tmp_path) as tree:
        assert (tree / "file").read_text() == "before"
    assert not tree.exists()
    assert len(git("worktree", "list").stdout.splitlines()) == 1
