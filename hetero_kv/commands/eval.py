"""The command `eval`: compares methods on tasks of papers and on the user's texts."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from hetero_kv.errors import ConfigError
from hetero_kv.evals.config_spec import config_specs, config_words, require_effect_somewhere
from hetero_kv.evals.options import DEFAULT_DEPTHS, DEFAULT_LENGTHS, RunOptions, parse_depth, parse_length, parse_list
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.printing import console, json_text
from hetero_kv.rules.precedence import COMMAND_LINE, SETTINGS_FILE, SettingsSource, in_force
from hetero_kv.rules.setting_flags import add_setting_flags, settings_of
from hetero_kv.rules.settings_file import read_settings_file
from hetero_kv.rules.trust import trusted_modules
from hetero_kv.serving.speculation.ways import require_way_or_model
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.flags import FlagParser, add_loading_flags

if TYPE_CHECKING:
    from hetero_kv.evals import Comparison, Run

_logger = logging.getLogger(__name__)


def add_flags(parser: FlagParser) -> None:
    """Add the command's flags to `parser`."""
    parser.epilog_of_help = _epilog
    what = parser.add_argument_group("run")
    what.add_argument(
        "--task", metavar="T[,T…]", help="tasks by name, or by pattern (ruler/niah_*); NAME=FILE for ruler's qa tasks"
    )
    what.add_argument(
        "--config",
        "--optimize_config_path",
        dest="configs",
        metavar="F[,F…]",
        help="methods: rules files or recipes' names, each optionally with settings "
        "(quest:top_k_blocks=64:block_size=32)",
    )
    what.add_argument("--no_baseline", action="store_true", help="leave out the untouched model, `full`")
    what.add_argument(
        "--share_baseline",
        action="store_true",
        help="start `full` from the recorded prefill too, instead of prefilling with transformers alone",
    )
    what.add_argument(
        "--no_recall",
        action="store_true",
        help="fidelity: do not measure the covered attention mass, which needs full attention at every step",
    )
    what.add_argument(
        "--unpacked",
        action="store_true",
        help="unpack a GGUF file's weights for all methods, as transformers does (default: they stay as stored)",
    )
    what.add_argument(
        "--speculation",
        default="off",
        metavar="WAY",
        help="guess tokens of methods' answers (lookup, sparse, auto, or a draft model by name or path), and verify "
        "several at once; answers are the same (default off)",
    )
    what.add_argument("--out", type=Path, metavar="DIR", help="folder for results, report and plots")
    what.add_argument(
        "--compare",
        nargs=2,
        metavar=("RUN_A", "RUN_B"),
        help="compare two runs' folders (or FOLDER:METHOD) instead: the paired difference per task, with its interval",
    )
    what.add_argument("--json", action="store_true", help="print the summary, or the comparison, as one JSON object")
    samples = parser.add_argument_group("samples")
    samples.add_argument(
        "--lengths",
        default=",".join(map(str, DEFAULT_LENGTHS)),
        metavar="N[,N…]",
        help="prompt lengths in tokens; 4k is 4,096 (default %(default)s)",
    )
    samples.add_argument(
        "--depths",
        default=",".join(f"{depth:g}" for depth in DEFAULT_DEPTHS),
        metavar="P[,P…]",
        help="positions of hidden answers, per cent of the context (default %(default)s)",
    )
    samples.add_argument("--samples", type=int, default=1, metavar="N", help="samples per length and depth (default 1)")
    samples.add_argument(
        "--seed", type=int, default=0, metavar="S", help="the same seed gives the same samples (default 0)"
    )
    samples.add_argument(
        "--limit", type=int, metavar="N", help="use only the first N samples of each task and data file"
    )
    samples.add_argument(
        "--haystack",
        type=Path,
        metavar="FILE",
        help="text around needles: plain, or JSON with a text field (default: RULER's noise sentences)",
    )
    samples.add_argument("--data", metavar="FILE[,FILE…]", help="public data files, unchanged: .jsonl or .jsonl.gz")
    samples.add_argument(
        "--prompt_file", metavar="FILE[,FILE…]", help="your own texts, for the tasks perplexity and fidelity"
    )
    samples.add_argument(
        "--max_new_tokens", type=int, default=64, metavar="N", help="fidelity: tokens of a continuation (default 64)"
    )
    samples.add_argument(
        "--prefill_tokens",
        type=int,
        metavar="N",
        help="perplexity: tokens to prefill before scoring the rest (default 1024, at most half of a text)",
    )
    samples.add_argument(
        "--stride",
        type=int,
        default=1,
        metavar="N",
        help="perplexity: tokens per forward after the prefill, for methods of fixed memory (default 1); a policy's "
        "own stride is cascade:stride=N",
    )
    add_loading_flags(parser, default=DEFAULT_MODEL)
    add_setting_flags(parser, lambda flags: config_words(flags.configs))


def _epilog() -> str:
    # Two tasks compute with torch, so that all are imported for the help only.
    from hetero_kv.evals.run_request import registry

    lines = "; ".join(f"{name}: {registry.get(name).meaning}" for name in registry.names())
    return (
        "The same command continues a stopped run. Sources of settings, the first wins: a config's own "
        "(quest:block_size=32), these flags, the rules file, ~/.hetero_kv/config.yaml, the defaults shown. "
        f"Tasks: {lines}."
    ).replace("%", "%%")


def run(flags: argparse.Namespace) -> int:
    """Run an evaluation, or compare two runs; returns the exit status.

    Raises:
        HeteroKVError: a mistake in the flags or files, a model that cannot be loaded, or rules that do not fit it.
    """
    from hetero_kv.evals import ConfiguredModel, compare
    from hetero_kv.evals import run as run_evaluation
    from hetero_kv.evals.packed_model import load_packed
    from hetero_kv.evals.run_request import registry, requested_tasks, require_use
    from hetero_kv.loading import load_model
    from hetero_kv.threads import set_threads

    if flags.compare:
        _print_comparisons(compare(*flags.compare), as_json=flags.json)
        return 0
    # Check everything that needs no model first: loading one is slow.
    if flags.out is None:
        raise ConfigError("out is missing; name a folder for the results: --out DIR")
    options = RunOptions(
        lengths=parse_list(flags.lengths, parse_length, "lengths"),
        depths=parse_list(flags.depths, parse_depth, "depths"),
        samples=flags.samples,
        seed=flags.seed,
        limit=flags.limit,
        haystack=flags.haystack,
        data=_paths(flags.data, "data"),
        prompt_files=_paths(flags.prompt_file, "prompt_file"),
        max_new_tokens=flags.max_new_tokens,
        prefill_tokens=flags.prefill_tokens,
        stride=flags.stride,
    )
    tasks = parse_list(flags.task, str, "task") if flags.task else ()
    task_files = requested_tasks(tasks)
    if not task_files and not options.data:
        raise ConfigError(f"task and data are missing; give one of them. Tasks: {', '.join(registry.names())}")
    require_way_or_model(flags.speculation)
    require_use(task_files, options, flags.speculation)
    configs = config_specs(config_words(flags.configs), trusted_modules(flags))
    if not configs and flags.no_baseline:
        raise ConfigError("there is nothing to run: give a config, or leave out --no_baseline")
    if not configs and flags.speculation != "off":
        raise ConfigError(
            f"speculation is {flags.speculation}, and the untouched model has none; give a config, or omit it"
        )
    settings = settings_of(flags)
    require_effect_somewhere(settings, configs)
    settings_file = read_settings_file()
    sources = [SettingsSource(COMMAND_LINE, settings), SettingsSource(SETTINGS_FILE, settings_file)]
    engine = in_force(EngineSettings, sources, where="settings").settings
    arguments: dict[str, Any] = {
        "name_or_path": flags.model or flags.gguf_path or DEFAULT_MODEL,
        "gguf_path": flags.gguf_path if flags.model else None,
        "dtype": flags.dtype,
        "device": flags.device,
        "trust_remote_code": flags.trust_remote_code,
    }
    if flags.unpacked:
        set_threads(engine.resolved_threads())
        loaded = load_model(**arguments)
        # The user has chosen this: rules need not warn of it.
        loaded.model.hetero_kv_unpacked = None
    else:
        loaded = load_packed(**arguments, threads_num=engine.threads_num)
    model = ConfiguredModel(
        loaded,
        configs,
        baseline=not flags.no_baseline,
        share_baseline=flags.share_baseline,
        measure_recall=not flags.no_recall,
        speculation=flags.speculation,
        settings=settings,
        settings_file=settings_file,
    )
    try:
        done = run_evaluation(tasks, model, flags.out, options, command_line=shlex.join(["hetero-kv", *sys.argv[1:]]))
    except KeyboardInterrupt:
        _logger.warning("%s has the results so far; the same command continues from there", flags.out)
        raise
    _print_run(done, as_json=flags.json)
    return 0


def _paths(words: str | None, flag: str) -> tuple[Path, ...]:
    return parse_list(words, Path, flag) if words else ()


def _print_run(done: Run, *, as_json: bool) -> None:
    if as_json:
        print(json_text(done.summary))
        return
    methods = list(done.summary["settings"]["methods"])
    tasks = done.summary["tasks"]
    rows = [["task", "samples", *methods]]
    for task, of_task in tasks.items():
        scores = [f"{of_task[method]['score']:.3f}" if method in of_task else "" for method in methods]
        rows.append([task, str(max(of_method["samples"] for of_method in of_task.values())), *scores])
    terminal = console()
    if _width(rows) > terminal.width:
        rows = min(rows, [list(column) for column in zip(*rows, strict=True)], key=_width)
    table = Table(title="mean scores, 0 to 1", title_justify="left")
    for number, heading in enumerate(rows[0]):
        table.add_column(escape(heading), justify="right" if number else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    terminal.print(table)
    if skipped := len(done.summary["skipped_samples"]):
        terminal.print(f"{skipped} samples were skipped; report.md has the reasons")
    terminal.print(f"Report: {done.out / 'report.md'}", markup=False, highlight=False, soft_wrap=True)


def _width(rows: list[list[str]]) -> int:
    """The terminal columns that a table takes if no cell is folded."""
    return 1 + sum(3 + max(map(len, column)) for column in zip(*rows, strict=True))


def _print_comparisons(comparisons: list[Comparison], *, as_json: bool) -> None:
    if as_json:
        print(json_text([asdict(comparison) for comparison in comparisons]))
        return
    terminal = console()
    by_methods: dict[tuple[str, str], list[Comparison]] = {}
    for found in comparisons:
        by_methods.setdefault((found.method_a, found.method_b), []).append(found)
    for (method_a, method_b), of_methods in by_methods.items():
        title = method_a if method_a == method_b else f"from {method_a} to {method_b}"
        table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("task", overflow="fold")
        for heading in ("pairs", "A", "B", "B - A", "interval", "better", "worse"):
            table.add_column(heading, justify="right", no_wrap=True)
        for found in of_methods:
            low, high = found.interval
            table.add_row(
                escape(found.task),
                str(found.pairs),
                f"{found.mean_a:.3f}",
                f"{found.mean_b:.3f}",
                f"{found.difference:+.3f}{'*' if found.is_certain else ' '}",
                f"{low:+.2f} … {high:+.2f}",
                str(found.better),
                str(found.worse),
            )
        terminal.print(table)
    terminal.print(
        "Mean scores over the samples of both runs. Intervals: 95 %, bootstrap over samples; * excludes 0. With few "
        "samples they are too narrow."
    )
    if unpaired := sum(found.unpaired for found in comparisons):
        terminal.print(f"{unpaired} samples are in one run only and are not counted")
