"""Tokens per second with and without speculation: questions that quote a document, and open ones.

    python -m benchmarks.speculation [--model NAME] [--recipe adaptive] [--lengths 4096,16384] [--questions 20]
        [--kinds quoting,open] [--tokens 128] [--ways lookup] [--rows 8] [--json FILE] [--plot FILE]

A document is source code of Python's standard library. A question that quotes is about a function of it, word for word,
with another name, or its first lines; an open one has nothing to do with the document. Every question is answered once
in each way, in turns, behind the same document, which passes once; answers whose tokens differ are counted. A figure is
the median over the questions of the ratio of tokens per second to those without speculation, and the mean of both
speeds. `--rows` answers so many questions at a time. A way is `lookup`, `sparse` (whose goal is for `--recipe dense
--lengths 31000`), or a draft model's name or path; what a prompt takes to pass the draft model counts, where it is not
known from an earlier question about the same document. The plot shows the median ratio by length, a line per way and
kind of question.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import statistics
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Label, label_lines, new_figure, save
from hetero_kv import Engine, SamplingParams, load_model
from hetero_kv.models import DEFAULT_MODEL

GOALS = {"quoting": 2.0, "open": 0.98, "rows": 1.0, "sparse": 1.4}
_QUOTING = (
    "Write out the function `{name}` of the text above exactly as it stands there.",
    "Rename the function `{name}` of the text above to `renamed_{name}`, and give the whole function.",
    "Quote the first lines of the function `{name}` above, then say in one sentence what it does.",
)
# So many that every way finds the same part of a question in memory, all but its last token.
_KEPT = 256
_OPEN = (
    "Write a short story about a lighthouse keeper who collects clocks.",
    "What should somebody know before moving to another country?",
    "Explain to a child why the sky is blue, and the evening red.",
    "Give advice to a friend who has to speak in public for the first time.",
    "Describe a market in the morning, with its sounds and smells.",
)


def documents(length: int, count: int, engine: Engine) -> list[tuple[str, list[str]]]:
    """Texts of some `length` tokens, and the names of functions in each."""
    generator = random.Random(0)
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    generator.shuffle(paths)
    found = []
    for path in paths:
        source = path.read_text()
        tokens = engine.tokenizer(source).input_ids
        if len(tokens) < length:
            continue
        text = engine.tokenizer.decode(tokens[:length])
        names = [
            node.name
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
            and 6 < node.end_lineno - node.lineno < 30
            and ast.get_source_segment(source, node) in text
        ]
        if len(names) >= 4:
            found.append((text, names))
        if len(found) == count:
            break
    if not found:
        raise SystemExit(f"no module of Python's standard library has {length} tokens and four short functions there")
    return found


def questions(length: int, count: int, is_quoting: bool, engine: Engine) -> list[list[int]]:
    """Prompts of a document and a question each."""
    prompts = []
    texts = documents(length, -(-count // 4), engine)
    for number in range(count):
        text, names = texts[number // 4 % len(texts)]
        question = _QUOTING[number % len(_QUOTING)].format(name=names[number % 4])
        if not is_quoting:
            question = _OPEN[number % len(_OPEN)] + f" Begin with the letter {chr(65 + number)}."
        message = {"role": "user", "content": f"```python\n{text}\n```\n\n{question}"}
        prompts.append(engine.encode([message]))
    return prompts


def speeds(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, way: str
) -> tuple[float, list[tuple[int, ...]], float]:
    """Tokens per second of all prompts at a time behind their first tokens; the answers; the share of right guesses."""
    sampling = SamplingParams(max_new_tokens=tokens)
    streams = [engine.generate(each, sampling, speculation=way) for each in prompts]
    while len(engine._scheduler.queues.running) < len(streams) and not any(each.is_done for each in streams):
        engine.step()
    before = sum(len(each.tokens) - each.prompt_tokens for each in engine._scheduler.queues.running)
    before += sum(len(each.result().pieces) for each in streams if each.is_done)
    began = time.perf_counter()
    while not all(each.is_done for each in streams):
        engine.step()
    seconds = time.perf_counter() - began
    found = [each.result() for each in streams]
    drafted, accepted = sum(each.drafted_tokens for each in found), sum(each.accepted_tokens for each in found)
    made = sum(len(each.pieces) for each in found) - before
    return made / seconds, [each.tokens for each in found], accepted / drafted if drafted else float("nan")


def measure(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, rows: int) -> dict[str, float | int]:
    """The figures of one kind of question."""
    way = engine.speculation
    ratios, fast, slow, shares, different = [], [], [], [], 0
    for first in range(0, len(prompts), rows):
        group = prompts[first : first + rows]
        for each in group:
            engine.generate(each, SamplingParams(max_new_tokens=1)).result()
        of = {name: speeds(engine, group, tokens, name) for name in ("off", way)[:: 1 if first // rows % 2 else -1]}
        ratios.append(of[way][0] / of["off"][0])
        slow.append(of["off"][0])
        fast.append(of[way][0])
        shares.append(of[way][2])
        different += sum(mine != theirs for mine, theirs in zip(of[way][1], of["off"][1], strict=True))
    known = [share for share in shares if share == share]
    return {
        "ratio": statistics.median(ratios),
        "worst": min(ratios),
        "tokens_per_second": statistics.mean(fast),
        "without": statistics.mean(slow),
        "right_guesses": statistics.mean(known) if known else 0.0,
        "different_answers": different,
    }


def plot(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """The ratio of one question at a time by tokens of the document, a labelled line for each way and kind."""
    figure, axes = new_figure()
    alone = [line for line in lines if line["rows"] == 1]
    names = list(dict.fromkeys((line["way"], line["questions"]) for line in alone))
    labels = []
    for number, (way, kind) in enumerate(names):
        of_name = [line for line in alone if (line["way"], line["questions"]) == (way, kind)]
        points = sorted((line["length"], line["ratio"]) for line in of_name)
        axes.plot(*zip(*points, strict=True), marker="o", color=f"C{number}")
        labels.append(Label(f"{way}, {kind}", *points[-1], f"C{number}"))
    lengths = sorted({line["length"] for line in alone})
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 2.5)
    axes.set_xlabel("tokens of the document")
    axes.set_ylabel("times as fast as without guesses")
    axes.set_title("What guessing the next tokens gains (higher is better)", fontsize=10)
    label_lines(figure, axes, labels)
    save(figure, axes, path)


def main() -> None:
    """Print a table, and the costs of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--recipe", default="adaptive")
    parser.add_argument("--lengths", default="4096,16384", help="tokens of a document, with commas between")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--kinds", default="quoting,open", help="kinds of questions, with commas between")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--ways", default="lookup", help="ways to guess, with commas between")
    parser.add_argument("--rows", type=int, default=8, help="questions at a time in the last lines")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the ratios to this file")
    flags = parser.parse_args()
    lengths = [int(each) for each in flags.lengths.split(",")]
    model = load_model(flags.model, config=flags.recipe)
    lines: list[dict[str, Any]] = []
    for way in flags.ways.split(","):
        # A request cannot load a draft model.
        with Engine(
            model, max_seq_len=max(lengths) + 1536, max_batch=flags.rows, checkpoint_gb=0, speculation=way,
            starts_thread=False, kept_prefixes=_KEPT,
        ) as engine:  # fmt: skip
            if engine.speculation == "off":
                raise SystemExit(f"{way} has nothing to guess: {engine._scheduler.forward.why_no_drafts}")
            for length in lengths:
                for kind in flags.kinds.split(","):
                    prompts = questions(length, flags.questions, kind == "quoting", engine)
                    for rows in (1, flags.rows) if length == min(lengths) and flags.rows > 1 else (1,):
                        figures = measure(engine, prompts, flags.tokens, rows)
                        goal = GOALS["rows"] if rows > 1 else GOALS["sparse" if way == "sparse" else kind]
                        lines.append(
                            {"way": engine.speculation, "questions": kind, "length": length, "rows": rows, "goal": goal}
                            | figures
                        )
            speculation = engine._speculation
            costs = {rows: round(speculation.costs.of(rows), 4) for rows in range(1, 9)}
            print(f"{engine.speculation}: seconds of a step by rows: {costs}")
            if speculation.draft is not None:
                print(f"{engine.speculation}: seconds of a guess: {speculation.draft.guess_s:.4f}")
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in line.values()))
    Console(width=130).print(table)
    if flags.json:
        flags.json.write_text(json.dumps(lines, indent=1))
    if flags.plot:
        plot(lines, flags.plot)


if __name__ == "__main__":
    main()
