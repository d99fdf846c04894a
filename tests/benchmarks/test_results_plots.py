"""Plots of the page's tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import caption, filled, plotted_tables
from benchmarks.results_plots import Point, pictures_of, tables_of
from hetero_kv.errors import HeteroKVError

FIDELITY = """
| recipe | tokens | agreement | KL, nats | KB read |
|---|---:|---:|---:|---:|
| full attention | all | 1.00 (1.00 to 1.00) | 0.000 (0.000 to 0.000) |  |
| quest | 1/32 | 0.73 (0.66 to 0.79) | 0.95 (0.60 to 1.36) | 196 |
| quest | 1/16 | 0.80 (0.73 to 0.86) | 0.64 (0.37 to 0.97) | 261 |
| adaptive | as shipped | 0.98 (0.97 to 0.99) | 0.004 (0.003 to 0.005) | 509 |
"""
NEEDLE = """
| recipe | tokens | score | needle | KB read |
|---|---:|---:|---:|---:|
| full attention | all | 0.85 (0.70 to 1.00) | 0.85 |  |
| quest | 1/32 | 0.75 (0.55 to 0.90) | 0.75 | 195 to 198 |
"""
PAGE = (
    f"# A page\n\n{caption('fidelity', 4096, 20)}{FIDELITY}\n![](results-fidelity-4096.png)\n\n"
    f"{caption('needle', 4096, 7)}{NEEDLE}\n![](results-needle-4096.png)\n\n| of | no caption |\n|---|---|\n| a | b |\n"
)


def test_tables_are_found_by_their_captions():
    tables = tables_of(PAGE)
    assert list(tables) == [("fidelity", 4096), ("needle", 4096)]
    fidelity, needle = tables.values()
    assert fidelity.points == (
        Point("quest", 1 / 32, 0.95, 196),
        Point("quest", 1 / 16, 0.64, 261),
        Point("adaptive", None, 0.004, 509),
    )
    assert (needle.samples, needle.full, needle.points) == (7, 0.85, (Point("quest", 1 / 32, 0.75, 195),))


def test_every_picture_that_a_page_shows_is_drawn(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert [path.name for path in pictures_of(page)] == ["results-fidelity-4096.png", "results-needle-4096.png"]
    assert all(path.stat().st_size > 10_000 for path in tmp_path.glob("*.png"))


def test_a_picture_of_no_table_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("results-needle-4096.png", "results-turns-4096.png"))
    with pytest.raises(HeteroKVError, match=r"no table of turns at 4096 tokens \(fidelity 4096, needle 4096\)"):
        pictures_of(page)


def test_a_row_that_cannot_be_read_is_refused():
    with pytest.raises(HeteroKVError, match="a row of the table of needle at 4,096 tokens cannot be read"):
        tables_of(PAGE.replace("0.75 (0.55 to 0.90)", "much"))


@pytest.mark.slow
def test_the_page_of_results_has_a_table_for_every_picture_that_it_shows(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "results.md"
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    assert {"results-fidelity-4096.png", "results-pairs-4096.png"} <= {path.name for path in pictures_of(copy)}


def test_a_picture_is_drawn_from_all_rows_of_a_record_that_the_page_shows_in_part(tmp_path):
    columns = ["recipe", "tokens", "score", "KB read"]
    entry = {"columns": columns, "rows": [["full attention", "all", "0.85", ""], ["quest", "1/32", "0.75", "195"]]}
    entry |= {"status": "current", "command": None, "machine": "one", "commit": None, "date": None}
    entry |= {"of": ["needle", 4096, 7], "pivot": ["recipe", "tokens", "score"]}
    record = {"question": "Found?", "goal": None, "setup": "Seven.", "measurements": [entry]}
    (tmp_path / "found.json").write_text(json.dumps(record))
    page = "<!-- record: found -->\n<!-- end of record -->\n"
    assert tables_of(filled(page, tmp_path)) == {}
    table = tables_of(plotted_tables(page, tmp_path))["needle", 4096]
    assert table.points == (Point("quest", 1 / 32, 0.75, 195),)
