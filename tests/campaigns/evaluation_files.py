"""Data files and folders of runs, mutated: they give samples, results or a HeteroKVError."""

from __future__ import annotations

import gzip
import json
import random as randomness
import shutil
from pathlib import Path

from tests.campaigns.campaign import Campaign, WrongResultError
from tests.campaigns.evaluation import answered, evaluate
from tests.campaigns.mutation import mutated

RECORDS = (
    ("kv.jsonl", {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"]], "key": "k2", "value": "v2"}),
    ("niah_single_1.jsonl", {"index": 0, "input": "A special magic number is hidden?", "outputs": ["1"], "length": 9}),
    ("qasper.jsonl", {"input": "Why?", "context": "An {article}.", "answers": ["because"], "dataset": "qasper"}),
    ("passkey.jsonl", {"context": "noise 71432", "input": "What is the pass key?", "answer": ["71432"]}),
    ("code_debug.jsonl", {"context": "x", "input": "y", "answer": ["b", "B"], "options": ["a", "b", "c", "d"]}),
    ("math_find.jsonl", {"context": "[1]", "input": "The largest number of", "answer": 1}),
)


def prepare_data(folder: Path) -> None:
    """Nothing that is shared."""


def attempt_data(prepared: None, random: randomness.Random, folder: Path) -> None:
    """A data file of three lines, packed in half of the tries, read."""
    from hetero_kv.evals.data_files import read_data_file

    name, record = random.choice(RECORDS)
    content = b"".join(json.dumps(record).encode() + b"\n" for _ in range(3))
    content = mutated(content, random)
    if random.random() < 0.5:
        name, content = f"{name}.gz", gzip.compress(content)
        content = mutated(content, random) if random.random() < 0.3 else content
    (folder / name).write_bytes(content)
    for sample in read_data_file(folder / name).samples:
        if not all(isinstance(turn, str) for turn in sample.turns):
            raise WrongResultError(f"a sample asks {sample.turns!r}")


def prepare_runs(folder: Path) -> Path:
    """A finished run."""
    evaluate(folder / "run")
    return folder / "run"


def attempt_runs(run: Path, random: randomness.Random, folder: Path) -> None:
    """A run one of whose files was changed, gone on with, and compared with the run as it was."""
    from hetero_kv.evals import compare

    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(run, out)
    path = out / random.choice(("run.json", "results.jsonl", "results.jsonl"))
    content = path.read_bytes()
    if random.random() < 0.2:
        old = json.loads((out / "run.json").read_text())
        del old["line_checksums"]
        (out / "run.json").write_text(json.dumps(old))
    path.write_bytes(_changed(content, random))
    is_old = b"line_checksums" not in (out / "run.json").read_bytes()
    compare(out, run)
    evaluate(out)
    if not is_old and answered(out) != answered(run):
        raise WrongResultError("a changed result was taken")


def _changed(content: bytes, random: randomness.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    way = random.randrange(4)
    if way == 0:
        random.shuffle(lines)
        return b"".join(lines)
    if way == 1:
        return b"".join([*lines, random.choice(lines)])
    return mutated(content, random)


CAMPAIGNS = (
    Campaign("data files", 400, prepare_data, attempt_data),
    Campaign("folders of runs", 300, prepare_runs, attempt_runs),
)
