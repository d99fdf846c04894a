"""`hetero-kv eval`: flags, errors and output."""

from __future__ import annotations

import json

import pytest

from hetero_kv.cli import main
from tests.support.tiny_evaluation import save_tiny

SPARSE = ("--block_size", 4, "--local_windows_len", 16, "--sink_tokens", 8, "--top_k_blocks", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("hetero_kv.evals.report.draw_plots", lambda folder, summary: ([], None))


@pytest.fixture
def evaluate(folder, capsys):
    """Runs the command on the tiny model; returns what it printed, or its error where that is due."""

    def run(*words, status=0):
        assert main(["eval", "--model", str(folder), "--dtype", "float32", *map(str, words)]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def test_a_run_writes_its_files_and_prints_the_scores(evaluate, tmp_path):
    words = ("--task", "recite", "--config", "quest,streaming", "--lengths", "200,0.25k", "--depths", "50", *SPARSE)
    printed = evaluate(*words, "--out", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("run.json", "results.jsonl", "summary.json", "costs.json", "report.md", ".lock")
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["settings"]["lengths"] == [200, 256]
    assert list(summary["settings"]["methods"]) == ["full", "quest", "streaming"]
    assert summary["settings"]["methods"]["quest"]["operators"][1]["settings"]["block_size"] == 4
    (row,) = (line for line in printed.splitlines() if "recite" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["recite", "2", "0.000", "0.000", "0.000"]
    assert f"Report: {tmp_path / 'out' / 'report.md'}" in printed


def test_the_same_command_again_goes_on_and_other_flags_are_refused(evaluate, tmp_path):
    words = (
        "--task",
        "recite",
        "--no_baseline",
        "--config",
        "quest",
        "--lengths",
        "200",
        *SPARSE,
        "--out",
        tmp_path / "o",
    )
    first = json.loads(evaluate(*words, "--depths", "0,100", "--json"))
    results = tmp_path / "o" / "results.jsonl"
    results.write_text(results.read_text().splitlines(keepends=True)[0])
    assert json.loads(evaluate(*words, "--depths", "0,100", "--json")) == first
    assert list(first["tasks"]["recite"]) == ["quest"]
    assert "holds a run with other settings: depths" in evaluate(*words, "--depths", "0", status=2)


def test_two_runs_are_compared(evaluate, tmp_path):
    words = ("--task", "recite", "--lengths", "200", "--depths", "50", *SPARSE)
    for config in ("quest", "streaming"):
        evaluate(*words, "--config", config, "--out", tmp_path / config)
    found = json.loads(evaluate("--compare", tmp_path / "quest", tmp_path / "streaming", "--json"))
    assert [(each["method_a"], each["method_b"], each["pairs"]) for each in found] == [
        ("full", "full", 1),
        ("quest", "streaming", 1),
    ]
    printed = evaluate("--compare", tmp_path / "quest", tmp_path / "streaming")
    assert "from quest to streaming" in printed
    assert [line.split()[:2] for line in printed.splitlines() if "recite" in line] == [["recite", "1"]] * 2


# Tables that fit are printed above.
@pytest.mark.slow
def test_a_table_too_wide_for_the_terminal_has_a_line_per_method(evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    words = ("--task", "recite", "--lengths", "200", "--depths", "50", *SPARSE, "--no_baseline", "--out", tmp_path)
    printed = evaluate(*words, "--config", "quest:top_k_blocks=2,quest:top_k_blocks=pyramid(1, 3)")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert ["quest:top_k_blocks=2", "0.000"] in rows
    assert ["quest:top_k_blocks=pyramid(1, 3)", "0.000"] in rows


def test_help_lists_the_tasks(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "needle:",
        "ruler/niah_single_1:",
        "perplexity: negative",
        "fidelity: agreement",
        "--top_k_blocks",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "recite"), "out is missing; name a folder for the results: --out DIR"),
        (("--out", "o"), "task and data are missing; give one of them. Tasks: needle"),
        (("--out", "o", "--task", "nedle"), "task 'nedle' is not known; did you mean 'needle'"),
        (("--out", "o", "--task", "recite", "--config", "qest"), "there is no rules file 'qest'; did you mean quest"),
        (("--out", "o", "--task", "recite", "--no_baseline"), "there is nothing to run: give a config"),
        (("--out", "o", "--task", "recite", "--lengths", "4q"), "lengths has '4q'; a length is a number of tokens"),
        (("--out", "o", "--task", "recite", "--lengths", "1.3"), "lengths has '1.3'"),
        (("--out", "o", "--task", "recite", "--lengths", "1k,,2k"), "lengths is '1k,,2k'; write one or more"),
        (("--out", "o", "--task", "recite", "--depths", "half"), "depths has 'half'"),
        (("--out", "o", "--task", "recite", "--samples", "none"), "argument --samples: invalid int value"),
        (("--out", "o", "--task", "recite", "--haystack", "gone.txt"), "haystack: there is no file 'gone.txt'"),
        (("--out", "o", "--data", "gone.jsonl"), "data: there is no file 'gone.jsonl'"),
        (("--out", "o", "--task", "recite", "--lengths", "4k"), "lengths has 4096, and max_seq_len is 2048"),
        (("--out", "o", "--task", "recite", "--block_siz", "4"), "unknown flag '--block_siz'"),
        (("--compare", "gone", "gone"), "'gone' holds no run"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(evaluate, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in evaluate(*words, status=2)


def test_an_unknown_model_is_named(capsys, tmp_path):
    assert main(["eval", "--task", "recite", "--out", str(tmp_path), "--model", "smollm3-135m"]) == 2
    assert "no model is called 'smollm3-135m'" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(evaluate, tmp_path, monkeypatch, caplog):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hetero_kv.evals.configured_model.greedy", interrupted)
    evaluate("--task", "recite", "--lengths", "200", "--out", tmp_path / "out", status=130)
    assert "has the results so far; the same command continues from there" in caplog.text


@pytest.mark.parametrize(("flag", "value"), [("stride", 4), ("prefill_tokens", 100)])
def test_an_option_of_perplexity_without_perplexity_is_refused(evaluate, tmp_path, flag, value):
    words = ("--task", "recite", "--config", "quest", f"--{flag}", value, "--out", tmp_path / "out")
    error = " ".join(evaluate(*words, status=2).split())
    assert f"{flag} is {value}, but only the task perplexity uses it" in error
    assert not (tmp_path / "out").exists()


def test_guessing_is_refused_where_no_task_generates(evaluate, tmp_path):
    words = ("--task", "fidelity", "--config", "quest", "--speculation", "lookup", "--out", tmp_path / "out")
    error = " ".join(evaluate(*words, status=2).split())
    assert "speculation is lookup, but no task of fidelity generates answers of a method" in error


def test_guessing_is_refused_for_the_untouched_model_alone(evaluate, tmp_path):
    error = " ".join(
        evaluate("--task", "recite", "--speculation", "lookup", "--out", tmp_path / "out", status=2).split()
    )
    assert "speculation is lookup, and the untouched model has none; give a config" in error
