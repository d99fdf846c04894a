"""What `hetero-kv` answers before it computes: help, errors and lists come without what takes seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_kv.cli import main

ROOT = Path(__file__).parent.parent
ASKING = """
import json, runpy, sys
from hetero_kv.cli import main
words = json.loads(sys.argv[1])
try:
    if words[:1] == ["local_chat.py"]:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    status = main(words)
except SystemExit as end:
    status = end.code
print(json.dumps([status, sorted({"torch", "transformers", "numba"} & set(sys.modules))]))
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        pytest.param([], 2, "usage: hetero-kv COMMAND", marks=pytest.mark.slow),
        (["--help"], 0, "usage: hetero-kv COMMAND"),
        pytest.param(["help"], 0, "lists the flags of a command", marks=pytest.mark.slow),
        pytest.param(["--version"], 0, "hetero-kv ", marks=pytest.mark.slow),
        (["plam", "--model", "x"], 2, "hetero-kv has no command 'plam'; did you mean plan?"),
        pytest.param(
            ["--json", "x"],
            2,
            "hetero-kv has no command '--json'; known: chat, serve, eval, models, contexts, plan, rules, ",
            marks=pytest.mark.slow,
        ),
        (["local_chat.py", "--help"], 0, "--top_k_blocks"),
        pytest.param(
            ["local_chat.py", "--top-k-block", "9"], 2, "did you mean --top_k_blocks?", marks=pytest.mark.slow
        ),
        (["eval", "--taks", "x"], 2, "unknown flag '--taks'; did you mean --task?"),
        pytest.param(
            ["plan", "--devise", "x"], 2, "unknown flag '--devise'; did you mean --device?", marks=pytest.mark.slow
        ),
        pytest.param(["contexts", "lst"], 2, "contexts has no action 'lst'", marks=pytest.mark.slow),
        (["methods"], 0, "streaming_llm"),
        pytest.param(["lm_eval", "--help"], 0, "usage: hetero-kv lm_eval ARG", marks=pytest.mark.slow),
        pytest.param(["rules", "layered"], 2, "there is no rules file 'layered'", marks=pytest.mark.slow),
        pytest.param(["rules", "quest:block_size=32"], 0, "block_size 32", marks=pytest.mark.slow),
        (["rules", "tova", "--json"], 0, '"operator": "BoundedAttention"'),
    ],
)
def test_what_needs_no_model_imports_no_torch(arguments, status, said, monkeypatch, tmp_path):
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    done = subprocess.run(
        [sys.executable, "-c", ASKING, json.dumps(arguments)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert json.loads(last) == [status, []]
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize("module", ["hetero_kv", "hetero_kv.cli"])
def test_it_runs_as_a_module(module):
    done = subprocess.run([sys.executable, "-m", module, "plam"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "hetero-kv has no command 'plam'; did you mean plan?" in done.stderr


def test_an_instruction_set_that_is_none_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setenv("HETERO_KV_ISA", "sse9")
    assert main(["models", "list"]) == 2
    assert "HETERO_KV_ISA is 'sse9'; the instruction sets are " in capsys.readouterr().err


def test_colons_of_a_name_make_no_emoji(capsys):
    assert main(["models", "fetch", ":key:a"]) == 2
    assert "':key:a'" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_output_that_cannot_be_written_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hetero_kv", "methods"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert "error: standard output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
