"""Lines of the benchmarks' data files, and files of them."""

from __future__ import annotations

import json

from hetero_kv.evals.data_files import read_data_file
from hetero_kv.evals.sample import Sample

KV = {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]], "key": "k3", "value": "v3"}
RULER = {"index": 0, "input": "A special magic number is hidden ...?", "outputs": ["1234567"], "length": 90}
QASPER = {"input": "Why?", "context": "An article {with braces}.", "answers": ["because", "so"], "dataset": "qasper"}
PASSKEY = {"id": 0, "context": "noise 71432 noise", "input": "What is the pass key?", "answer": ["71432"]}


def written(path, *records) -> object:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def only(path) -> Sample:
    (sample,) = read_data_file(path).samples
    return sample
