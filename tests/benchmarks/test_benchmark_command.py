"""`python -m benchmarks`: its help and its refusals run nothing."""

from __future__ import annotations

import runpy

import pytest


@pytest.mark.parametrize(
    ("word", "status", "words"),
    [("--help", 0, "all if none is named: peers"), ("nope", 2, "no benchmark nope; there are: peers")],
)
def test_help_and_an_unknown_name_list_the_benchmarks(monkeypatch, capsys, word, status, words):
    monkeypatch.setattr("sys.argv", ["benchmarks", word])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.__main__", run_name="__main__")
    assert ended.value.code == status
    printed = capsys.readouterr()
    assert words in " ".join((printed.out + printed.err).split())
