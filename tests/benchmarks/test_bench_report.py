"""Records of measurements become sections of the documents."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import CURRENT, PAGES, RECORDS, ROOT, filled, load, main, rendered
from hetero_kv.errors import HeteroKVError

MEASUREMENT = {
    "status": "current",
    "command": "python -m benchmarks.one",
    "machine": "2 cores",
    "commit": "abc1234",
    "date": "2026-11-26",
    "columns": ["recipe", "tokens", "score", "ms"],
    "rows": [["dense", "1/8", "1.00 (0.90 to 1.00)", "7"], ["quest", "1/8", "0.50 (0.40 to 0.60)", "5"]],
    "verdict": "Met.",
}
EARLIER = MEASUREMENT | {"status": "superseded", "rows": [["dense", "1/8", "0.11", "9"]]}
PAGE = "# A page\n\n<!-- record: one -->\nanything\n<!-- end of record -->\n\nBehind it.\n"


def record_of(folder: Path, *measurements: dict[str, Any]) -> Path:
    """A folder with the record `one`."""
    record = {"question": "How fast?", "goal": "7 ms.", "setup": "One core.", "measurements": list(measurements)}
    (folder / "one.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_up_to_date_with_their_records(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDS.glob("*.json")))
def test_every_record_can_be_shown(name):
    record = load(name)
    assert record.question.endswith("?")
    assert rendered(record)
    current = [measurement.status == CURRENT for measurement in record.measurements]
    assert current[0] or not any(current)
    assert current == sorted(current, reverse=True)


def test_every_command_of_a_record_runs_a_module_or_a_file_of_the_tree():
    commands = "\n".join(m.command or "" for path in RECORDS.glob("*.json") for m in load(path.stem).measurements)
    modules = set(re.findall(r"python -m ([\w.]+)", commands))
    files = set(re.findall(r"python ([\w/]+\.py)", commands))
    assert modules >= {"benchmarks.peers", "benchmarks.results"}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_a_section_has_goal_command_commit_table_and_verdict_and_no_superseded_figure(tmp_path):
    text = filled(PAGE, record_of(tmp_path, MEASUREMENT, EARLIER))
    assert text.startswith("# A page\n\n<!-- record: one -->\n\n**How fast?** One core.\n\nGoal: 7 ms.\n")
    assert "2 cores; commit `abc1234`, 2026-11-26." in text
    assert "```sh\npython -m benchmarks.one\n```" in text
    assert "| dense | 1/8 | 1.00 (0.90 to 1.00) | 7 |\n" in text
    assert "Met.\n\n<!-- end of record -->\n\nBehind it.\n" in text
    assert "anything" not in text
    assert "0.11" not in text
    assert filled(text, tmp_path) == text


def test_a_page_shows_some_columns_or_a_column_per_budget(tmp_path):
    shown = MEASUREMENT | {"shown": ["recipe", "ms"]}
    assert "| recipe | ms |\n|---|---:|\n| dense | 7 |" in filled(PAGE, record_of(tmp_path, shown))
    pivot = MEASUREMENT | {"pivot": ["recipe", "tokens", "score"]}
    assert "| recipe | 1/8 |\n|---|---:|\n| dense | 1.00 |" in filled(PAGE, record_of(tmp_path, pivot))


def test_a_table_that_is_plotted_has_its_caption(tmp_path):
    of = MEASUREMENT | {"of": ["needle", 4096, 20]}
    assert "<!-- needle, 4,096 tokens, 20 samples -->\n| recipe |" in filled(PAGE, record_of(tmp_path, of))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": [["dense", "7"]]}, r"has 2 of 4 cells"),
        ({"status": "old"}, r"status 'old'; use 'current' or 'superseded'"),
        ({"shown": ["speed"]}, r"shown has \['speed'\]"),
        ({"speed": 1}, r"unexpected keyword argument 'speed'; a measurement has the fields status,"),
    ],
)
def test_a_record_that_is_wrong_is_refused(tmp_path, change, said):
    with pytest.raises(HeteroKVError, match=said):
        filled(PAGE, record_of(tmp_path, MEASUREMENT | change))


def test_a_record_that_is_missing_is_named(tmp_path):
    with pytest.raises(HeteroKVError, match=r"no record 'two' in .*; there are: one"):
        filled(PAGE.replace("record: one", "record: two"), record_of(tmp_path, MEASUREMENT))


def test_check_reports_an_outdated_page_and_leaves_it(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- record: peers -->\n<!-- end of record -->\n")
    assert main(["--check", str(page)]) == 1
    assert "out of date" in capsys.readouterr().out
    assert page.read_text() == "<!-- record: peers -->\n<!-- end of record -->\n"
    assert main([str(page)]) == 0
    assert main(["--check", str(page)]) == 0
