"""The request of a run: its subjects, tasks and samples, checked before anything is computed."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.evals import fidelity, perplexity
from hetero_kv.evals.configured_model import ConfiguredModel
from hetero_kv.evals.data_files import read_data_file
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.logits_task import LogitsTask, LogitsTaskRequest, PromptFile
from hetero_kv.evals.options import RunOptions
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.subject import Answerer, CallableSubject, CountTokens, Subject
from hetero_kv.evals.tasks import registry
from hetero_kv.evals.tasks.registry import TaskRequest
from hetero_kv.evals.text_files import text_of

_logger = logging.getLogger(__name__)
_SHOWN_LINES = 5


def subjects_of(models: ConfiguredModel | Mapping[str, Answerer] | Sequence[Subject]) -> list[Subject]:
    """The subjects in `models`. Raises HeteroKVError without subjects, and for two methods of one name."""
    if isinstance(models, ConfiguredModel):
        subjects: list[Subject] = [models]
    elif isinstance(models, Mapping):
        subjects = [CallableSubject(name, answer) for name, answer in models.items()]
    else:
        subjects = list(models)
    methods = [method for subject in subjects for method in subject.methods]
    repeated = {method for method in methods if methods.count(method) > 1}
    if not methods or repeated:
        found = f"{sorted(repeated)[0]!r} twice" if repeated else "none"
        raise ConfigError(f"methods: there is {found}; give one or more models, each with a name of its own")
    return subjects


def requested_tasks(words: Sequence[str]) -> dict[str, Path | None]:
    """The tasks that `words` name, each with its data file, if one is named.

    Raises HeteroKVError for an unknown task, and a missing file.
    """
    tasks: dict[str, Path | None] = {}
    for word in words:
        pattern, _, file = word.partition("=")
        matching = [pattern] if "*" not in pattern else fnmatch.filter(registry.names(), pattern)
        if not matching:
            raise ConfigError(f"task {pattern!r} matches none; there are {', '.join(registry.names())}")
        if file and not Path(file).is_file():
            raise ConfigError(f"task {word!r}: there is no file {file!r}; give the path of one that exists")
        for name in matching:
            if file and not registry.get(name).needs_data_file:
                takes = ", ".join(name for name in registry.names() if registry.get(name).needs_data_file)
                raise ConfigError(f"task {word!r}: {name} is not built from a file; those that are: {takes}")
            tasks[name] = Path(file) if file else None
    return tasks


def require_use(tasks: Collection[str], options: RunOptions, speculation: str = "off") -> None:
    """Raise ConfigError for an option that no task of a run uses: of perplexity, or of tasks that generate."""
    if speculation != "off" and not options.data and all(isinstance(registry.get(name), LogitsTask) for name in tasks):
        raise ConfigError(
            f"speculation is {speculation}, but no task of {', '.join(tasks)} generates answers of a method; request "
            "one that does, or omit it"
        )
    for name, is_set in (("stride", options.stride > 1), ("prefill_tokens", options.prefill_tokens is not None)):
        if is_set and perplexity.Perplexity.name not in tasks:
            raise ConfigError(
                f"{name} is {getattr(options, name)}, but only the task {perplexity.Perplexity.name} uses it; "
                "request that task, or omit it"
            )


def require_measurable(tasks: Iterable[str], subjects: Sequence[Subject]) -> None:
    """Raise ConfigError for a task that measures logits and a subject that only answers with texts."""
    for name in tasks:
        if not isinstance(registry.get(name), LogitsTask):
            continue
        for subject in subjects:
            if not isinstance(subject, ConfiguredModel):
                raise ConfigError(
                    f"task {name!r} is measured from a model's logits, and {subject.methods[0]!r} only answers with "
                    "texts; leave one of them out"
                )


def require_methods(tasks: Iterable[str], request: TaskRequest, subjects: Sequence[Subject]) -> None:
    """Raise the error of a task that cannot measure one of the methods."""
    for task in map(registry.get, tasks):
        for subject in subjects:
            if isinstance(task, LogitsTask) and isinstance(subject, ConfiguredModel):
                assert isinstance(request, LogitsTaskRequest)
                task.require_methods(request, subject)


def require_room(tasks: Iterable[str], options: RunOptions, configured: ConfiguredModel | None) -> None:
    """Raise ConfigError for a length beyond `max_seq_len`."""
    # Prompt files are used at their full length.
    by_length = set(tasks) - ({fidelity.FidelityTask.name} if options.prompt_files else set())
    if configured is None or not by_length:
        return
    for length in options.lengths:
        if length > configured.max_seq_len:
            raise ConfigError(
                f"lengths has {length}, and max_seq_len is {configured.max_seq_len} tokens (the model was made for "
                f"{configured.loaded.context_length}); take shorter lengths, or set --max_seq_len to go beyond that"
            )


def request_of(
    options: RunOptions, configured: ConfiguredModel | None, count_tokens: CountTokens | None
) -> TaskRequest:
    """The request to the tasks. Raises HeteroKVError for files that cannot be read, and without `count_tokens`."""
    if configured is not None:
        count_tokens = count_tokens or configured.count_tokens
    elif count_tokens is None:
        raise ConfigError("count_tokens is None; give a function that counts a text's tokens, as the model does")
    request: dict[str, Any] = {
        "lengths": options.lengths,
        "depths": options.depths,
        "samples": options.samples,
        "seed": options.seed,
        "haystack": None if options.haystack is None else Haystack.from_file(options.haystack),
        "count_tokens": count_tokens,
    }
    if configured is None:
        return TaskRequest(**request)
    return LogitsTaskRequest(
        **request,
        template_tokens=configured.template_tokens,
        encode=configured.encoded,
        decode=configured.loaded.tokenizer.decode,
        prompt_files=tuple(_prompt_file(path) for path in options.prompt_files),
        max_new_tokens=options.max_new_tokens,
        prefill_tokens=options.prefill_tokens,
        stride=options.stride,
    )


def _prompt_file(path: Path) -> PromptFile:
    text = text_of(path, "prompt_file")
    if not text.strip():
        raise ConfigError(f"prompt_file {str(path)!r} is empty; give a file with text in it")
    return PromptFile(path.name, text)


def samples_of(
    tasks: Mapping[str, Path | None], options: RunOptions, request: TaskRequest
) -> tuple[list[Sample], dict[str, list[tuple[int, str]]]]:
    """The samples in the order of the run, and the unusable lines of data files.

    Raises HeteroKVError if there are none, and for two of one name.
    """
    samples: list[Sample] = []
    skipped: dict[str, list[tuple[int, str]]] = {}
    for name, file in tasks.items():
        samples += islice(registry.get(name).generate(replace(request, data_file=file)), options.limit)
    for path in options.data:
        data = read_data_file(path)
        samples += data.samples[: options.limit]
        skipped[path.name] = [(line, reason) for line, reason in data.skipped]
        _warn_of_lines(path, data.skipped)
    ids = [sample.id for sample in samples]
    if not ids:
        raise HeteroKVError("there is no sample to run: the data files hold none that could be read")
    if len(set(ids)) < len(ids):
        repeated = next(name for index, name in enumerate(ids) if name in ids[:index])
        raise HeteroKVError(f"two samples are called {repeated!r}; give each task and each data file once")
    return samples, skipped


def _warn_of_lines(path: Path, skipped: Sequence[tuple[int, str]]) -> None:
    for line, reason in skipped[:_SHOWN_LINES]:
        _logger.warning("%s: line %d is skipped: %s", path, line, reason)
    if len(skipped) > _SHOWN_LINES:
        _logger.warning("%s: %d more lines are skipped; summary.json lists them", path, len(skipped) - _SHOWN_LINES)
