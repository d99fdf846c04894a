"""Windows of a long text: the passages that perplexity and fidelity are measured on."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.logits_task import LogitsTaskRequest


def text_windows(task: str, request: LogitsTaskRequest) -> Iterator[tuple[str, int, str]]:
    """(name, length in tokens, text) of each passage: `samples` of every length, at places drawn by the seed.

    Lengths are exact up to the token or two that change where a text is cut.

    Raises HeteroKVError if there is no text, or one is too short.
    """
    for name, text in _texts(task, request):
        tokens = request.encode(text)
        for length in request.lengths:
            if len(tokens) < length:
                raise HeteroKVError(
                    f"task {task!r}: {name} has {len(tokens)} tokens, which is less than a length of {length}; give a "
                    "longer text, or lengths that fit"
                )
            for number in range(request.samples):
                rng = random.Random(f"{request.seed} {name} {length} {number}")
                start = rng.randrange(len(tokens) - length + 1)
                called = f"{name}/{length}/{number}" if request.prompt_files else f"{length}/{number}"
                yield called, length, request.decode(tokens[start : start + length])


def _texts(task: str, request: LogitsTaskRequest) -> list[tuple[str, str]]:
    if request.prompt_files:
        return [(file.name, file.text) for file in request.prompt_files]
    if request.haystack is None:
        raise HeteroKVError(f"task {task!r} needs a text: give --prompt_file FILE, or --haystack FILE")
    haystack = request.haystack
    return [(f"haystack {haystack.name}", " ".join(haystack.sentences))]
