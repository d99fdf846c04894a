"""A stopped run resumes without repeating or losing a sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from hetero_kv import HeteroKVError
from hetero_kv.evals import ConfiguredModel, RunOptions, config_specs, run
from hetero_kv.evals.checked_lines import with_checksum
from tests.evals.counting_runs import OPTIONS, Counting, go
from tests.support.tiny_evaluation import SPARSE, save_tiny, tiny_loaded

pytestmark = pytest.mark.usefixtures("no_plots")

HERE = Path(__file__).parent


def recorded(folder):
    """Every line of a run's results, but for what it cost and the checksum, which is of that too."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("cost", "checksum")} for line in lines]


def test_a_run_goes_on_where_it_was_interrupted(tmp_path):
    first, second = Counting(until=2), Counting()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, first)
    assert not (tmp_path / "summary.json").exists()
    go(tmp_path, second)
    assert first.samples + second.samples == [f"recite/200/{depth}/0" for depth in (0, 50, 100)]


@pytest.mark.parametrize("until", range(6))
def test_a_run_of_two_methods_goes_on_with_either_as_if_it_had_not_stopped(tmp_path, until):
    both = {"first": Counting(), "second": Counting()}
    run(["recite"], both, tmp_path / "whole", OPTIONS, count_tokens=len)
    # The models of a run that stops after `most` answers in total, and those of the run that continues.
    answered, stopped = {"first": [], "second": []}, tmp_path / "stopped"

    def answering(method, most):
        def answer(sample):
            if sum(map(len, answered.values())) == most:
                raise KeyboardInterrupt
            answered[method].append(sample.id)
            return [answers[0] for answers in sample.answers]

        return answer

    with pytest.raises(KeyboardInterrupt):
        run(["recite"], {name: answering(name, until) for name in both}, stopped, OPTIONS, count_tokens=len)
    run(["recite"], {name: answering(name, 1000) for name in both}, stopped, OPTIONS, count_tokens=len)
    assert answered == {name: model.samples for name, model in both.items()}
    assert recorded(stopped) == recorded(tmp_path / "whole")
    assert (stopped / "summary.json").read_bytes() == (tmp_path / "whole" / "summary.json").read_bytes()


def test_a_line_that_a_kill_cut_off_is_dropped_and_its_sample_run_again(tmp_path):
    go(tmp_path, Counting())
    results = tmp_path / "results.jsonl"
    whole, summary = results.read_bytes(), (tmp_path / "summary.json").read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (0, 1, len(lines[2]) // 2, len(lines[2]) - 1):
        results.write_bytes(b"".join(lines[:2]) + lines[2][:cut])
        again = Counting()
        go(tmp_path, again)
        assert again.samples == ["recite/200/100/0"]
        assert results.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
        assert (tmp_path / "summary.json").read_bytes() == summary


def test_a_finished_run_only_rewrites_its_reports(tmp_path):
    go(tmp_path, Counting())
    files = ("summary.json", "costs.json", "report.md")
    before = {name: (tmp_path / name).read_bytes() for name in (*files, "results.jsonl", "run.json")}
    for name in files:
        (tmp_path / name).unlink()
    again = Counting()
    go(tmp_path, again)
    assert again.samples == []
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"samples": 2}, "samples is 1 there and 2 now"),
        ({"seed": 7}, "seed is 0 there and 7 now"),
        ({"lengths": (300,)}, r"lengths\[0\] is 200 there and 300 now"),
        ({"limit": 1}, "limit is None there and 1 now"),
    ],
)
def test_a_folder_with_another_run_is_refused_and_the_difference_named(tmp_path, other, difference):
    go(tmp_path, Counting())
    options = RunOptions(**{"lengths": (200,), "depths": (0, 50, 100), **other})
    with pytest.raises(HeteroKVError, match=f"holds a run with other settings: {difference}.*give another folder"):
        go(tmp_path, Counting(), options)


def test_settings_of_a_method_are_settings_of_the_run(tmp_path):
    loaded = tiny_loaded()
    options = RunOptions(lengths=(200,), depths=(0,))

    def with_settings(**settings):
        return ConfiguredModel(loaded, config_specs(["quest"]), settings={**SPARSE, **settings})

    run(["recite"], with_settings(), tmp_path, options)
    run(["recite"], with_settings(threads_num=1), tmp_path, options)
    with pytest.raises(HeteroKVError, match=r"methods\.quest\..*block_size is 8 there and 4 now"):
        run(["recite"], with_settings(block_size=4), tmp_path, options)


def test_a_file_that_changed_is_another_run(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("One. Two. Three.")
    options = RunOptions(lengths=(200,), depths=(0,), haystack=text)
    go(tmp_path / "out", Counting(), options)
    text.write_text("One. Two. Four.")
    with pytest.raises(HeteroKVError, match=r"haystack\.sha256 is '\w+' there"):
        go(tmp_path / "out", Counting(), options)


def test_a_prompt_that_changed_under_the_same_settings_is_refused(tmp_path):
    go(tmp_path, Counting())
    results = tmp_path / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    lines[1]["prompt"] = "0" * 16
    for line in lines:
        del line["checksum"]
    results.write_text("".join(with_checksum(json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(HeteroKVError, match="sample recite/200/50/0 has another prompt now"):
        go(tmp_path, Counting())


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    go(tmp_path, Counting())
    results = tmp_path / "results.jsonl"
    lines = results.read_text().splitlines()
    results.write_text("\n".join([lines[0], "{}", *lines[2:]]) + "\n")
    with pytest.raises(HeteroKVError, match="line 2 is no result"):
        go(tmp_path, Counting())


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    with FileLock(tmp_path / ".lock"), pytest.raises(HeteroKVError, match="another run is writing to it"):
        go(tmp_path, Counting())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HeteroKVError, match=r"file/out' cannot be written"):
        go(tmp_path / "file" / "out", Counting())


def _killed(tmp_path, kills, seed, samples):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    settings_file = {"HETERO_KV_CONFIG": str(tmp_path / "settings.yaml"), "PYTHONPATH": str(HERE.parents[1])}
    words = [save_tiny(tmp_path / "tiny"), text, tmp_path, kills, seed, samples]
    done = subprocess.run(
        [sys.executable, str(HERE / "killed_run.py"), *map(str, words)],
        env={**os.environ, **settings_file},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    final = (tmp_path / "killed" / "results.jsonl").read_text().split("\n")[:-1]
    assert len(seen) == kills
    assert all(lines == final[: len(lines)] for lines in seen)
    assert any(0 < len(lines) < len(final) for lines in seen)
    results = [json.loads(line) for line in final]
    assert len({(result["sample"], result["method"]) for result in results}) == len(results)
    whole, killed = ((tmp_path / name / "summary.json").read_bytes() for name in ("whole", "killed"))
    assert killed == whole
    assert set(json.loads(whole)["tasks"]) == {"passkey", "fidelity", "perplexity"}


@pytest.mark.slow
def test_a_run_killed_at_random_moments_has_the_summary_of_one_that_was_not(tmp_path):
    _killed(tmp_path, kills=3, seed=1, samples=1)


@pytest.mark.slow
def test_a_run_killed_twenty_times_has_the_summary_of_one_that_was_not(tmp_path):
    _killed(tmp_path, kills=20, seed=2, samples=4)
