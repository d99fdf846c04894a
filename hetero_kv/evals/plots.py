"""A run's plots: heat maps over length and depth, score against budget, likelihood along a text, recall by layer."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from hetero_kv.durable_file import write_atomically

_logger = logging.getLogger(__name__)

_NOT_IN_FILE_NAMES = r"[^\w.-]"
_LONGEST_NAME = 100

WITHOUT_MATPLOTLIB = (
    "No plots were drawn: matplotlib is not installed. `pip install 'hetero-kv[plots]'`, then the same command draws "
    "them from the results that are there."
)


def draw_plots(folder: Path, summary: Mapping[str, Any]) -> tuple[list[Path], str | None]:
    """Draw the plots of a run's summary.

    Returns the files, and a note if matplotlib is missing, which is no error.
    """
    try:
        import matplotlib.figure
    except ImportError:
        _logger.warning(WITHOUT_MATPLOTLIB)
        return [], WITHOUT_MATPLOTLIB
    drawn = []
    # Names of methods may contain dollar signs, which would mark a formula.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        # The warning prints the character, which may be a terminal control.
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
        for name, figure in _figures(summary):
            folder.mkdir(exist_ok=True)
            path = folder / f"{re.sub(_NOT_IN_FILE_NAMES, '_', name)[:_LONGEST_NAME]}.png"
            # No date and no version: the same summary gives the same file.
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=120, metadata={"Software": None})
            write_atomically(path, image.getvalue())
            drawn.append(path)
    return drawn, None


def _figures(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    attended = summary.get("attended_tokens", {})
    for task, of_task in summary["tasks"].items():
        with_depth = {method: what["cells"] for method, what in of_task.items() if what["cells"]}
        if with_depth:
            yield f"{task}_by_depth", heat_maps(task, with_depth)
        with_curve = {method: what["curves"] for method, what in of_task.items() if "curves" in what}
        if with_curve:
            yield f"{task}_by_position", curves(task, with_curve)
        with_recall = {method: what["block_recall"] for method, what in of_task.items() if "block_recall" in what}
        if with_recall:
            yield f"{task}_by_layer", recall_by_layer(task, with_recall)
    if len(attended) > 2:
        for length in sorted({length for of_method in attended.values() for length in of_method}, key=int):
            scores = _scores_at(summary["tasks"], length)
            if scores and len({attended[m][length] for m in attended if length in attended[m]}) > 2:
                yield f"score_by_budget_{length}", score_by_budget(length, scores, attended)


def heat_maps(task: str, methods: Mapping[str, Any]) -> Any:
    """A heat map of scores per method, depth downwards and length to the right; each cell shows its score."""
    from matplotlib.figure import Figure

    lengths = sorted({cell["length"] for cells in methods.values() for cell in cells})
    depths = sorted({cell["depth"] for cells in methods.values() for cell in cells})
    columns = min(3, len(methods))
    rows = -(-len(methods) // columns)
    width, height = 1.4 + 0.75 * len(lengths), 1.3 + 0.42 * len(depths)
    figure = Figure(figsize=(max(4.5, width * columns + 0.8), height * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    image: Any = None
    for axis, (method, cells) in zip(axes.flat, methods.items(), strict=False):
        values = [[float("nan")] * len(lengths) for _ in depths]
        for cell in cells:
            values[depths.index(cell["depth"])][lengths.index(cell["length"])] = cell["score"]
        image = axis.imshow(values, vmin=0, vmax=1, cmap="RdYlBu", aspect="auto")
        for row, of_depth in enumerate(values):
            for column, value in enumerate(of_depth):
                if value == value:
                    colour = "white" if abs(value - 0.5) > 0.35 else "black"
                    axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(lengths)), [_thousands(length) for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
        axis.set_title(method, fontsize=9)
        axis.set_xlabel("tokens")
        axis.set_ylabel("depth")
    for axis in list(axes.flat)[len(methods) :]:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, label="score", fraction=0.05)
    figure.suptitle(task)
    return figure


def curves(task: str, methods: Mapping[str, Mapping[str, Any]]) -> Any:
    """Cumulative negative log-likelihood against position, with a panel per length and a line per method."""
    from matplotlib.figure import Figure

    lengths = sorted({length for of_method in methods.values() for length in of_method}, key=int)
    figure = Figure(figsize=(5.2 * len(lengths), 3.6), layout="constrained")
    for axis, length in zip(figure.subplots(1, len(lengths), squeeze=False).flat, lengths, strict=True):
        for method, of_method in methods.items():
            if length in of_method:
                curve = of_method[length]
                sums = accumulate(curve["nll"])
                axis.plot(curve["position"], [total / count for count, total in enumerate(sums, 1)], label=method)
        axis.set_xlabel("position, tokens")
        axis.set_ylabel("mean NLL so far, nats")
        axis.set_title(f"{task}, {_thousands(int(length))} tokens", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


def recall_by_layer(task: str, methods: Mapping[str, Any]) -> Any:
    """The share of the attention mass that each method covers, by layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for method, recall in methods.items():
        measured = [(layer, value) for layer, value in enumerate(recall) if value is not None]
        axis.plot(*zip(*measured, strict=True), marker=".", label=method)
    axis.set_xlabel("layer")
    axis.set_ylabel("attention mass covered")
    axis.set_title(task, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def score_by_budget(
    length: str, scores: Mapping[str, Mapping[str, float]], attended: Mapping[str, Mapping[str, float]]
) -> Any:
    """The score of each method against the most tokens that it attends to, at one length, with a panel per task.

    A line joins the methods of one recipe under several settings (`quest:top_k_blocks=32`, `…=64`).
    """
    from matplotlib.figure import Figure

    columns = min(3, len(scores))
    rows = -(-len(scores) // columns)
    figure = Figure(figsize=(max(6.4, 4.6 * columns), 3.4 * rows + 0.5), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    series: dict[str, list[str]] = {}
    for method in attended:
        if length in attended[method]:
            series.setdefault(method.partition(":")[0], []).append(method)
    for axis, (task, of_task) in zip(axes, scores.items(), strict=False):
        for number, (recipe, methods) in enumerate(series.items()):
            points = sorted((attended[method][length], of_task[method]) for method in methods if method in of_task)
            if points:
                # Hollow markers of decreasing size: equal scores at equal budgets stay visible.
                axis.plot(
                    *zip(*points, strict=True),
                    label=methods[0] if len(methods) == 1 else recipe,
                    marker="osD^v<>PX*"[number % 10],
                    markersize=4 + 10 * (len(series) - number) / len(series),
                    markerfacecolor="none",
                    markeredgewidth=1.6,
                    color=f"C{number % 10}",
                )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
        axis.set_xlabel("tokens attended per step, at most")
        axis.set_ylabel("score")
        axis.set_ylim(-0.05, 1.1)
        axis.margins(x=0.15)
        axis.set_title(f"{task}, {_thousands(int(length))} tokens", fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[len(scores) :]:
        axis.set_axis_off()
    entries = dict(entry for axis in axes for entry in zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _scores_at(tasks: Mapping[str, Any], length: str) -> dict[str, dict[str, float]]:
    return {
        task: scores
        for task, of_task in tasks.items()
        if (scores := {m: w["lengths"][length]["score"] for m, w in of_task.items() if length in w["lengths"]})
    }


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
