"""Writes a run's summary as files: `summary.json`, `costs.json`, the plots and `report.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_kv.durable_file import write_atomically
from hetero_kv.engine.statistics import Statistic
from hetero_kv.evals.markdown import code, plain, table
from hetero_kv.evals.plots import draw_plots
from hetero_kv.evals.run_folder import as_utf8, read_settings, writing
from hetero_kv.evals.summary import COSTS
from hetero_kv.evals.tasks import registry
from hetero_kv.printing import escaped

# Each prompt file may have another length; a table has room for this many.
_MOST_LENGTHS = 12
# Tasks on the user's texts.
_OF_TEXTS = ("perplexity", "fidelity")


def write_reports(out: Path, summary: Mapping[str, Any], costs: Mapping[str, Any]) -> None:
    """Write the reports of a run into the folder `out`, from the results of `hetero_kv.evals.summary`.

    Raises HeteroKVError if they cannot be written.
    """
    with writing(out):
        for name, content in (("summary.json", summary), ("costs.json", costs)):
            text = escaped(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))
            write_atomically(out / name, as_utf8(f"{text}\n"))
        plots, missing = draw_plots(out / "plots", summary)
    environment = read_settings(out)["environment"]
    parts = _parts(summary, costs, environment, [path.relative_to(out).as_posix() for path in plots], missing)
    page = as_utf8("\n\n".join(parts) + "\n")
    with writing(out):
        write_atomically(out / "report.md", page)


def _parts(
    summary: Mapping[str, Any],
    costs: Mapping[str, Any],
    environment: Mapping[str, Any],
    plots: Sequence[str],
    no_plots: str | None,
) -> Iterator[str]:
    settings, tasks = summary["settings"], summary["tasks"]
    methods = list(settings["methods"])
    yield "# Evaluation"
    yield _origin(settings, environment)
    if tasks:
        yield "## Scores"
        yield _scores(tasks, methods, settings["baseline"])
    if "perplexity" in tasks:
        yield "## Perplexity"
        yield _perplexity(tasks["perplexity"], methods, settings["stride"])
    if "fidelity" in tasks:
        yield "## Fidelity to full attention"
        yield _fidelity(tasks["fidelity"], methods)
    by_length = [part for task in tasks if (part := _by_length(task, tasks[task], methods))]
    if by_length:
        yield "## By length"
        yield from by_length
    yield "## Methods"
    yield _methods(settings["methods"], summary.get("attended_tokens", {}))
    yield "## Where prefill was shared"
    yield _sharing(settings["methods"], costs)
    yield "## Cost"
    yield _cost(costs, settings["stride"] if "perplexity" in tasks else None)
    if summary["skipped_samples"] or any(summary["skipped_lines"].values()):
        yield "## Left out"
        yield _left_out(summary)
    yield "## Plots"
    yield (
        no_plots or "\n\n".join(f"![{plain(Path(plot).stem)}]({plot})" for plot in plots) or "There is nothing to draw."
    )


def _origin(settings: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    models = dict.fromkeys(
        f"{what['model']} ({what['dtype']}, {what['device']})"
        for what in settings["methods"].values()
        if "model" in what
    )
    depths = ", ".join(f"{depth:g}" for depth in settings["depths"])
    sample_settings = {
        "lengths": ", ".join(map(str, settings["lengths"])) + " tokens",
        "depths": f"{depths} % of the context",
        "samples": f"{settings['samples']} per length and depth, seed {settings['seed']}",
        "haystack": settings["haystack"]["name"] if settings["haystack"] else "noise sentences",
    }
    command = environment.get("command_line")
    rows = {
        "model": ", ".join(models) or None,
        **{name: value for name, value in sample_settings.items() if name in _applied(settings)},
        "limit": f"the first {settings['limit']} samples of each task and data file" if settings["limit"] else None,
        "data files": ", ".join(file["name"] for file in settings["data"]) or None,
        "prompt files": ", ".join(file["name"] for file in settings["prompt_files"]) or None,
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
        + f", Python {environment['python']}",
        "machine": f"{environment['processor'] or environment['system']}, {environment['cpus']} CPUs"
        + (f", {environment['gpu']}" if environment.get("gpu") else ""),
    }
    lines = [f"- command: {code(command)}"] if command else []
    return "\n".join((*lines, *(f"- {name}: {plain(value)}" for name, value in rows.items() if value)))


def _applied(settings: Mapping[str, Any]) -> set[str]:
    """The sample settings that some task of the run used; an unknown task counts as using all."""
    applied: set[str] = set()
    for name in settings["tasks"]:
        if name in _OF_TEXTS:
            # Fidelity uses prompt files whole, perplexity uses windows of them; neither uses noise.
            applied |= {"lengths", "samples"} if name == "perplexity" or not settings["prompt_files"] else set()
            applied |= {"haystack"} if settings["haystack"] and not settings["prompt_files"] else set()
            continue
        task = registry.get(name) if name in registry.names() else None
        applied |= {"lengths", "samples"}
        applied |= {"depths"} if task is None or task.uses_depth else set()
        applied |= {"haystack"} if task is None or task.uses_haystack else set()
    return applied


def _scores(tasks: Mapping[str, Any], methods: Sequence[str], baseline: str | None) -> str:
    rows = []
    for task, of_task in tasks.items():
        samples = sorted({of_method["samples"] for of_method in of_task.values()})
        cells = [_score_cell(of_task.get(method)) for method in methods]
        rows.append([task, " to ".join(map(str, dict.fromkeys((samples[0], samples[-1])))), *cells])
    note = "Mean scores, from 0 to 1; more is better."
    if baseline is not None:
        note += (
            f" Below each: its difference to {plain(baseline)} over the same samples, and in brackets the interval "
            "that 95 % of bootstrap resamples fall into; of few samples it is too narrow."
        )
    return f"{note}\n\n{table(['task', 'samples', *methods], rows)}"


def _score_cell(of_method: Mapping[str, Any] | None) -> str:
    if of_method is None:
        return ""
    cell = f"{of_method['score']:.3f}"
    if "difference" in of_method:
        low, high = of_method["difference_interval"]
        cell += f"\n{of_method['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
    return cell


def _perplexity(of_task: Mapping[str, Any], methods: Sequence[str], stride: int) -> str:
    lengths = _lengths(of_task)
    rows = [
        [method, *(_part(of_task[method], length, "perplexity", ".3f") for length in lengths)]
        for method in methods
        if method in of_task
    ]
    fed = (
        "one by one, so that their decode steps are what is measured"
        if stride == 1
        else f"in strides of {stride}, each one a turn, and drop entries after each"
    )
    return (
        "Perplexity of the tokens after the prefilled beginning, mean over the passages of a length; less is better. "
        f"Methods are fed these tokens {fed}; the untouched model "
        "reads them in chunks with full attention. The score in the tables above is 1 / perplexity of each passage.\n\n"
        + table(["method", *(f"{length} tokens" for length in lengths)], rows)
    )


def _fidelity(of_task: Mapping[str, Any], methods: Sequence[str]) -> str:
    shown = [method for method in methods if method in of_task]
    rows = [
        [
            method,
            *(
                f"{of_task[method]['parts'][part]:{form}}" if part in of_task[method]["parts"] else ""
                for part, form in (("top_1_agreement", ".3f"), ("kl_divergence", ".4f"), ("block_recall", ".4f"))
            ),
        ]
        for method in shown
    ]
    text = (
        "The untouched model's greedy continuation, forced through each method: the share of decoded tokens with the "
        "same likeliest next token, the Kullback-Leibler divergence of the next token (nats), and the share of the "
        "full attention mass that the attended blocks covered.\n\n"
        + table(["method", "top-1 agreement", "KL divergence", "block recall"], rows)
    )
    recalls = {method: of_task[method]["block_recall"] for method in shown if of_task[method].get("block_recall")}
    if recalls:
        layers = range(max(map(len, recalls.values())))
        by_layer = [
            [str(layer), *("" if recall[layer] is None else f"{recall[layer]:.4f}" for recall in recalls.values())]
            for layer in layers
        ]
        text += "\n\nBlock recall by layer:\n\n" + table(["layer", *recalls], by_layer)
    return text


def _by_length(task: str, of_task: Mapping[str, Any], methods: Sequence[str]) -> str:
    lengths = _lengths(of_task)
    if len(lengths) < 2:
        return ""
    shown = [method for method in methods if method in of_task]
    rows = [
        [length, *(f"{at['score']:.3f}" if (at := of_task[m]["lengths"].get(length)) else "" for m in shown)]
        for length in lengths
    ]
    return f"{plain(task)}:\n\n{table(['tokens', *shown], rows)}"


def _methods(methods: Mapping[str, Any], attended: Mapping[str, Mapping[str, float]]) -> str:
    lengths = sorted({length for of_method in attended.values() for length in of_method}, key=int)[:_MOST_LENGTHS]
    rows = [
        [
            method,
            what.get("rules") or ("the untouched model" if "prefill" in what else ""),
            *(f"{attended[method][length]:,.0f}" if method in attended else "" for length in lengths),
        ]
        for method, what in methods.items()
    ]
    note = (
        "Tokens that a decode step attends to, the mean over layers, by the length of the prompt; at most, where steps "
        "decide how many (`target_mass`). "
        if lengths
        else ""
    )
    return f"{note}Every setting is in `summary.json`.\n\n" + table(
        ["method", "rules", *(f"of {length}" for length in lengths)], rows
    )


def _sharing(methods: Mapping[str, Any], costs: Mapping[str, Any]) -> str:
    lines = []
    for method in methods:
        of_method = costs.get(method, {}).values()
        samples, shared = (sum(at[name] for at in of_method) for name in ("samples", "shared_prefills"))
        if shared:
            lines.append(
                f"- {plain(method)}: took the prefill that was recorded once per sample, for {shared} of {samples}"
            )
        elif samples:
            lines.append(f"- {plain(method)}: prefilled by itself, {samples} samples")
    return (
        "Methods whose prefill is full attention start from one recorded prefill of each sample; it is the same as "
        "their own, up to rounding where their chunk_size differs.\n\n" + "\n".join(lines)
    )


def _cost(costs: Mapping[str, Any], stride: int | None) -> str:
    """The table of costs; `stride` is perplexity's, if it was measured."""
    all_costs = [at for of_method in costs.values() for at in of_method.values()]
    counted = dict.fromkeys(
        name for at in all_costs for name, value in at.items() if name not in COSTS and value is not None
    )
    rows = [
        [
            method,
            length if int(length) else "of data files",
            _number(at["prefill_s"], ".2f"),
            _number(at["tokens_per_s"], ".1f"),
            _number(None if at["kv_bytes"] is None else at["kv_bytes"] / 1e6, ",.1f"),
            *(_counted(at[name]) for name in counted),
        ]
        for method, of_method in costs.items()
        for length, at in of_method.items()
    ]
    note = "Medians over all tasks' samples. A shared prefill's seconds are shown for every method that took it."
    if stride is not None and stride > 1:
        note += f" Perplexity's decoded tokens are fed {stride} at a time."
    known = _known_statistics() if counted else {}
    titles = [known[name].title if name in known else name for name in counted]
    if counted:
        note += " Of what layers count, means over the layers that do, at the end:"
        note += "".join(f" {known[name].title} — {known[name].meaning};" for name in counted if name in known)
        note = f"{note.rstrip(':;')}."
    return f"{note}\n\n" + table(["method", "tokens", "prefill s", "decode tokens/s", "KV MB", *titles], rows)


def _known_statistics() -> Mapping[str, Statistic]:
    # This imports torch, which a report without statistics need not wait for.
    from hetero_kv.rules.registered import layer_statistics

    return layer_statistics()


def _counted(value: float | None) -> str:
    return _number(value, ",.0f" if value is None or value >= 10 else ".3g")


def _left_out(summary: Mapping[str, Any]) -> str:
    lines = [f"- sample {plain(entry['sample'])}: {plain(entry['reason'])}" for entry in summary["skipped_samples"]]
    for file, skipped in summary["skipped_lines"].items():
        lines += [f"- {plain(file)}, line {entry['line']}: {plain(entry['reason'])}" for entry in skipped]
    shown = 40
    more = [f"- and {len(lines) - shown} more, in `summary.json`"] if len(lines) > shown else []
    return "\n".join(("These were run for no method.", "", *lines[:shown], *more))


def _lengths(of_task: Mapping[str, Any]) -> list[str]:
    return sorted({length for of_method in of_task.values() for length in of_method["lengths"]}, key=int)


def _part(of_method: Mapping[str, Any], length: str, part: str, form: str) -> str:
    at = of_method["lengths"].get(length)
    return f"{at['parts'][part]:{form}}" if at and part in at["parts"] else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
