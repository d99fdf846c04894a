"""Results become a summary, costs, a report and plots."""

from __future__ import annotations

import builtins
import json
import random
import re
from dataclasses import replace

import pytest

from hetero_kv.evals.bootstrap import mean_interval
from hetero_kv.evals.markdown import code
from hetero_kv.evals.outcome import Cost, Result
from hetero_kv.evals.plots import draw_plots
from hetero_kv.evals.report import write_reports
from hetero_kv.evals.run_folder import SETTINGS
from hetero_kv.evals.summary import costs, summarize
from hetero_kv.printing import printable

RUN = {
    "tasks": {"needle": None},
    "lengths": [1024, 2048],
    "depths": [0.0, 50.0],
    "samples": 1,
    "seed": 0,
    "limit": None,
    "haystack": None,
    "data": [],
    "prompt_files": [],
    "stride": 1,
    "baseline": "full",
    "methods": {
        "full": {"model": "tiny", "dtype": "float32", "device": "cpu", "prefill": "own"},
        "quest": {"model": "tiny", "dtype": "float32", "device": "cpu", "rules": "injection_rules/quest.yaml"},
        "peer": {},
    },
}
CELLS = [(length, depth) for length in (1024, 2048) for depth in (0.0, 50.0)]
SCORES = {"full": [1.0, 1.0, 1.0, 0.0], "quest": [1.0, 0.0, 0.5, 0.0], "peer": [0.0, 0.0, 0.0, 1.0]}


def result(method, index, task="needle", **more):
    length, depth = CELLS[index]
    cost = Cost(length, 9, 2.0 + index, 1.0, 8.0, 1000 * length, shared_prefill=method == "quest")
    return Result(
        f"{task}/{length}/{depth:g}/0",
        task,
        "hash",
        length,
        depth,
        method,
        ("said",),
        (("expected",),),
        SCORES[method][index],
        cost=cost,
        **more,
    )


RESULTS = [result(method, index) for index in range(4) for method in SCORES]


def summary_of(results=RESULTS, skipped=None, attended=None, settings=RUN):
    return {**summarize(settings, results, skipped or {}), "attended_tokens": attended or {}}


@pytest.fixture
def reported(tmp_path):
    """Writes the reports of results; returns report.md's text."""
    environment = {
        "command_line": "hetero-kv eval --task needle",
        "python": "3.11",
        "versions": {"torch": "2.13"},
        "processor": "a processor",
        "system": "Linux",
        "cpus": 2,
        "gpu": None,
    }
    (tmp_path / SETTINGS).write_text(json.dumps({"settings": RUN, "environment": environment}))

    def write(results=RESULTS, **more):
        write_reports(tmp_path, summary_of(results, **more), costs(results))
        return (tmp_path / "report.md").read_text()

    return write


def test_scores_are_means_with_differences_to_the_baseline():
    needle = summary_of()["tasks"]["needle"]
    assert [needle[method]["score"] for method in SCORES] == [0.75, 0.375, 0.25]
    assert needle["quest"]["difference"] == -0.375
    assert needle["quest"]["difference_interval"] == list(mean_interval([0, -1, -0.5, 0]))
    assert "difference" not in needle["full"]
    assert needle["quest"]["lengths"]["1024"]["score"] == 0.5
    assert needle["quest"]["cells"][1] == {"length": 1024, "depth": 50.0, "score": 0.0, "samples": 1}


def test_the_difference_counts_only_samples_that_both_answered():
    needle = summary_of([r for r in RESULTS if not (r.method == "full" and r.length == 1024)])["tasks"]["needle"]
    assert needle["quest"]["samples"] == 4
    assert needle["quest"]["difference"] == -0.25


def test_the_summary_does_not_depend_on_the_order_of_the_lines_nor_on_what_they_cost():
    mixed = [
        Result(**{**vars(r), "cost": Cost(decode_s=random.random())})
        for r in random.Random(1).sample(RESULTS, len(RESULTS))
    ]
    assert json.dumps(summary_of(mixed)) == json.dumps(summary_of())


def test_a_result_is_the_same_after_it_was_a_line():
    full = result("quest", 1, parts={"a": 0.5}, details={"curve": {"position": [1], "nll": [0.25]}})
    assert Result.from_json(full.to_json()) == full
    with pytest.raises((TypeError, KeyError, ValueError)):
        Result.from_json('{"sample": "needle"}')


def test_block_recall_is_averaged_layer_by_layer():
    recalls = ([1.0, None, 0.5], [0.5, None, 0.0])
    results = [result("quest", index, details={"block_recall": recall}) for index, recall in enumerate(recalls)]
    assert summary_of(results)["tasks"]["needle"]["quest"]["block_recall"] == [0.75, None, 0.25]


def test_costs_are_medians_by_method_and_length():
    of_quest = costs(RESULTS)["quest"]
    assert of_quest["1024"]["prefill_s"] == 2.5
    assert of_quest["2048"]["kv_bytes"] == 2048 * 1000
    assert of_quest["2048"]["shared_prefills"] == 2
    assert costs(RESULTS)["full"]["2048"]["shared_prefills"] == 0


def test_the_report_has_the_setup_and_the_results(reported):
    text = reported(attended={"full": {"1024": 1024.0}, "quest": {"1024": 300.0}})
    for part in (
        "- command: `hetero-kv eval --task needle`",
        "Tokens that a decode step attends to, the mean over layers, by the length of the prompt; at most, where steps",
        "- model: tiny (float32, cpu)",
        "- versions: torch 2.13, Python 3.11",
        "| task | samples | full | quest | peer |",
        "| needle | 4 | 0.750 | 0.375<br>-0.375 [",
        "| 1024 | 1.000 | 0.500 | 0.000 |",
        "| quest | injection_rules/quest.yaml | 300 |",
        "- quest: took the prefill that was recorded once per sample, for 4 of 4",
        "- full: prefilled by itself, 4 samples",
        "| quest | 2048 | 4.50 | 8.0 | 2.0 |",
        "![needle_by_depth](plots/needle_by_depth.png)",
    ):
        assert part in text


def test_skipped_samples_are_listed(reported):
    skipped = Result("needle/4096/0/0", "needle", "hash", 4096, 0.0, skipped="too long")
    text = reported([*RESULTS, skipped], skipped={"data.jsonl": [(3, "not JSON")]})
    assert "- sample needle/4096/0/0: too long" in text
    assert "- data.jsonl, line 3: not JSON" in text
    assert "## Left out" not in reported()


#: Commands of a terminal; ends of lines and cells; a link, an image, HTML, code; a formula that is none; a path.
HOSTILE = "\x1b]0;t\x07\x9b2J\u202e a|b\\|c\n\n# d <script> ![e](http://f) `g` $\\frac{$ ../h\0"


def test_names_of_others_command_no_terminal_break_no_table_and_make_no_links(reported, tmp_path, recwarn):
    results = [
        replace(each, task=HOSTILE, method=HOSTILE, sample=f"{HOSTILE}{number}") for number, each in enumerate(RESULTS)
    ]
    methods = {"full": {}, HOSTILE: {"model": HOSTILE, "dtype": HOSTILE, "device": "cpu", "rules": HOSTILE}}
    settings = {**RUN, "methods": methods, "data": [{"name": HOSTILE}], "baseline": HOSTILE}
    skipped = Result(HOSTILE, HOSTILE, "hash", 4096, 0.0, skipped=HOSTILE)
    attended = {HOSTILE: {"1024": 300.0, "2048": 400.0}}
    text = reported([*results, skipped], settings=settings, skipped={HOSTILE: [(3, HOSTILE)]}, attended=attended)
    shown = "]0;t2J a&#124;b&#92;&#124;c # d &#60;script&#62; ![e&#93;(http://f) &#96;g&#96; $&#92;frac{$ ../h"
    assert f"| task | samples | full | {shown.replace(' # d', '<br><br># d')} |" in text
    assert f"- sample {shown}: {shown}" in text
    assert f"- {shown}, line 3: {shown}" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]|<script|\\](?=.http)", text)
    # Headings, lists and cells are ours alone.
    assert not [line for line in text.splitlines() if line.startswith("# d")]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert all(len({line.count("|") for line in each.splitlines()}) == 1 for each in tables)
    assert not recwarn.list
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert [name for name in written if not name.startswith("plots/")] == [
        "costs.json",
        "report.md",
        SETTINGS,
        "summary.json",
    ]
    assert len(written) > 4
    for name in ("summary.json", "costs.json"):
        content = (tmp_path / name).read_text()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", content)
        # Nothing is lost in what programs read.
        assert HOSTILE in {*json.loads(content), *json.loads(content).get("tasks", ())}


def test_a_command_with_backticks_stays_code():
    assert [code(text) for text in ("a", "`a", "a ``b` c\n")] == ["`a`", "`` `a ``", "```a ``b` c```"]


def test_a_result_of_hostile_texts_is_a_printable_line_and_the_same_after_it():
    full = replace(RESULTS[0], predictions=(HOSTILE,), sample=HOSTILE)
    assert printable(full.to_json()) == full.to_json()
    assert Result.from_json(full.to_json()) == full


def test_perplexity_and_fidelity_have_tables_of_their_own(reported):
    parts = {"nll": 2.0, "perplexity": 7.389, "top_1_agreement": 0.875, "kl_divergence": 0.0625}
    results = [
        result("quest", 0, "perplexity", parts=parts, details={"curve": {"position": [512, 1024], "nll": [2.5, 1.5]}}),
        result("quest", 0, "fidelity", parts={**parts, "block_recall": 0.75}, details={"block_recall": [1.0, 0.5]}),
    ]
    text = reported(results)
    assert "| quest | 7.389 |" in text
    assert "| quest | 0.875 | 0.0625 | 0.7500 |" in text
    assert "| 1 | 0.5000 |" in text


def test_there_is_a_plot_of_each_kind(tmp_path):
    curve = {"position": [512, 1024], "nll": [2.5, 1.5]}
    results = [
        *RESULTS,
        result("quest", 0, "perplexity", details={"curve": curve}),
        result("quest", 0, "fidelity", details={"block_recall": [1.0, None, 0.5]}),
    ]
    attended = {"full": {"1024": 1024.0}, "quest": {"1024": 300.0}, "peer": {"1024": 200.0}}
    drawn, missing = draw_plots(tmp_path / "plots", summary_of(results, attended=attended))
    names = ["needle_by_depth", "perplexity_by_position", "fidelity_by_layer", "score_by_budget_1024"]
    assert {path.stem for path in drawn} >= set(names)
    assert missing is None
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_a_heat_map_has_a_cell_per_length_and_depth():
    from hetero_kv.evals.plots import heat_maps

    cells = summary_of()["tasks"]["needle"]["quest"]["cells"]
    figure = heat_maps("needle", {"quest": cells})
    (image,) = figure.axes[0].get_images()
    assert image.get_array().tolist() == [[1.0, 0.5], [0.0, 0.0]]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1K", "2K"]


def test_the_likelihood_is_drawn_cumulatively():
    from hetero_kv.evals.plots import curves

    figure = curves("perplexity", {"quest": {"1024": {"position": [256, 512, 1024], "nll": [3.0, 2.0, 1.0]}}})
    assert figure.axes[0].get_lines()[0].get_ydata() == pytest.approx([3.0, 2.5, 2.0])


def test_budgets_of_one_recipe_are_joined_to_a_line():
    from hetero_kv.evals.plots import score_by_budget

    attended = {"quest:n=8": {"1024": 300.0}, "full": {"1024": 1024.0}, "quest:n=2": {"1024": 100.0}}
    scores = {"needle": {"quest:n=8": 1.0, "full": 0.75, "quest:n=2": 0.5}}
    lines = {line.get_label(): line for line in score_by_budget("1024", scores, attended).axes[0].get_lines()}
    assert list(lines) == ["quest", "full"]
    assert lines["quest"].get_xydata().tolist() == [[100.0, 0.5], [300.0, 1.0]]


def test_a_run_of_data_files_alone_does_not_speak_of_lengths_and_depths(reported):
    assert "- lengths: 1024, 2048 tokens" in reported()
    text = reported(settings={**RUN, "tasks": {}, "limit": 5})
    assert "- lengths:" not in text
    assert "- limit: the first 5 samples of each task and data file" in text


@pytest.mark.parametrize(
    ("tasks", "files", "haystack", "named"),
    [
        (("needle",), (), None, {"lengths", "depths", "samples", "haystack"}),
        pytest.param(
            ("multi_turn_needle",), (), "essays.txt", {"lengths", "samples", "haystack"}, marks=pytest.mark.slow
        ),
        pytest.param(("ruler/cwe",), (), "essays.txt", {"lengths", "samples"}, marks=pytest.mark.slow),
        pytest.param(("fidelity",), ("notes.txt",), "essays.txt", {"prompt files"}, marks=pytest.mark.slow),
        (("fidelity", "kv_retrieval"), ("notes.txt",), None, {"prompt files", "lengths", "depths", "samples"}),
        pytest.param(
            ("perplexity",), ("notes.txt",), None, {"prompt files", "lengths", "samples"}, marks=pytest.mark.slow
        ),
        pytest.param(("perplexity",), (), "essays.txt", {"lengths", "samples", "haystack"}, marks=pytest.mark.slow),
        (("somebody's",), (), None, {"lengths", "depths", "samples", "haystack"}),
    ],
)
def test_a_report_names_the_settings_that_its_tasks_have_used_and_no_others(reported, tasks, files, haystack, named):
    text = reported(
        settings={
            **RUN,
            "tasks": dict.fromkeys(tasks),
            "prompt_files": [{"name": name} for name in files],
            "haystack": {"name": haystack} if haystack else None,
        }
    )
    rows = {*re.findall(r"^- (lengths|depths|samples|haystack|prompt files): ", text, re.MULTILINE)}
    assert rows == named


def test_without_matplotlib_the_report_says_how_to_get_the_plots(reported, monkeypatch, caplog):
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    text = reported()
    assert "pip install 'hetero-kv[plots]'" in text
    assert "![" not in text
    assert "matplotlib is not installed" in caplog.text


def test_a_mean_is_inside_its_interval_which_narrows_with_more_values():
    rng = random.Random(0)
    values = [rng.choice((0.0, 1.0)) for _ in range(400)]
    few, many = mean_interval(values[:20]), mean_interval(values)
    for interval, of in ((few, values[:20]), (many, values)):
        assert interval[0] < sum(of) / len(of) < interval[1]
    assert many[1] - many[0] < few[1] - few[0]
    # The normal approximation: 1.96 standard errors on each side.
    assert many[1] - many[0] == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.06)
    assert mean_interval(values) == many


def test_equal_values_leave_no_doubt_and_no_values_are_refused():
    assert mean_interval([0.5] * 7) == (0.5, 0.5)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
