"""Speed of the engine on this machine's GPU: one command, under nine minutes, no network, no model files.

    python -m benchmarks.gpu [--json FILE] [--minutes 8.5] [--gpu_memory 24] [--without_checks] [--only TEXT;TEXT]
    python -m benchmarks.gpu --device cpu --tiny        # everything at sizes that take seconds on a CPU

First the checks of exactness, sets, sparse prefill, `attend_on: gpu` and kernels of `benchmarks.gpu_check`; then, with
random weights of the shape of Llama 3.1 8B in bfloat16:

- decoding after a million random keys and values, in 8 of the 32 layers (`quest`, and `adaptive_lean` with
  `attend_on: gpu`)
- prefill and decode at 32K tokens with weights packed in Q4_0 (`ktransformers`)
- prefill and decode at 32K tokens: the untouched model, `ktransformers`, `shadowkv`; at 128K as time allows, with a
  sparse prefill too (`minference`; a random model's heads take the largest pattern)
- decoding after 32K and 128K random keys and values (`quest`), by the CPU and with `attend_on: gpu`, there with
  `adaptive` too
- ShadowKV by batch at 16K tokens, compared with the untouched model

and for each step the parts of the host's time. A measurement that would exceed the time is skipped, and one that does
is aborted; the output says so. Tokens/s and milliseconds are medians over decoded tokens, with a synchronisation after
each. Rows with a goal have a verdict behind the table. The exit status is 1 if a check or a measurement fails. GB are
10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import gpu_check
from benchmarks.gpu_checks.setting import Setting
from benchmarks.gpu_speed.budget import Budget, TimeUp
from benchmarks.gpu_speed.measurements import RESIDENT, K, Measurements
from benchmarks.gpu_speed.subject import UNTOUCHED, SpeedRow
from hetero_kv.errors import OutOfMemoryError

_CHECKED = ("exactness", "sets", "sparse", "resident", "kernels")
#: Name and tokens of a row -> the most milliseconds per token, and bytes on the GPU.
GOALS = {
    (f"quest{RESIDENT}", 128 * K): (12.5, 24e9),
    (f"adaptive{RESIDENT}", 128 * K): (12.5, 24e9),
    (f"adaptive_lean{RESIDENT}", K * K): (20.0, 24e9),
}
#: Name and tokens of a row -> the most of the untouched model's prefill time, which is by flash attention.
PREFILL_GOALS = {("minference", 128 * K): 0.5}


def main(arguments: list[str] | None = None) -> int:
    """Check and measure; returns the exit status."""
    flags = _flags(arguments)
    budget = Budget(60 * flags.minutes)
    setting = Setting(torch.device(flags.device), flags.tiny, 0, int(flags.gpu_memory * 1e9) if flags.gpu_memory else 0)
    _bound_memory(setting)
    machine = gpu_check.machine(setting)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    failed: list[str] = []
    left_out: dict[str, str] = {}
    if not flags.without_checks:
        _check(flags, budget, failed, left_out)
    rows = _measured(Measurements(setting), flags.only, budget, failed, left_out)
    print(table(rows))
    for verdict in verdicts(rows):
        print(verdict)
    for title, why in left_out.items():
        print(f"left out: {title} ({why})")
    print(f"{len(rows)} rows, {len(failed)} failed, {len(left_out)} left out; {budget.spent:.0f} s")
    if flags.json:
        report = {
            "machine": machine,
            "seconds": budget.spent,
            "failed": failed,
            "left_out": left_out,
            "rows": [asdict(row) for row in rows],
        }
        Path(flags.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


def table(rows: list[SpeedRow]) -> str:
    """The measurements as a Markdown table."""
    lines = [
        "| recipe | tokens | rows | layers | prefill tokens/s | ms per token | tokens/s | GPU GB | ms on the host |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        prefill = "filled" if row.prefill is None else f"{row.prefill:,.0f}"
        memory = "" if row.gpu_bytes is None else f"{row.gpu_bytes / 1e9:.1f}"
        parts = ", ".join(f"{name} {spent:.2f}" for name, spent in row.parts.items())
        lines.append(
            f"| {row.name} | {row.tokens:,} | {row.batch} | {row.layers} | {prefill} | {row.milliseconds:.2f} | "
            f"{row.tokens_per_s:.1f} | {memory} | {parts} |"
        )
    return "\n".join(lines)


def verdicts(rows: list[SpeedRow]) -> list[str]:
    """A line for each row that has a goal."""
    lines = []
    for row in rows:
        if (goal := GOALS.get((row.name, row.tokens))) is None:
            continue
        most, memory = goal
        used = row.gpu_bytes or 0
        verdict = "met" if row.milliseconds <= most and used <= memory else "missed"
        lines.append(
            f"goal: {row.name}, {row.tokens:,} tokens: at most {most} ms per token and {memory / 1e9:.0f} GB; "
            f"{row.milliseconds:.2f} ms and {used / 1e9:.1f} GB: {verdict}"
        )
    untouched = {(row.tokens, row.layers, row.batch): row.prefill for row in rows if row.name == UNTOUCHED}
    for row in rows:
        most, dense = PREFILL_GOALS.get((row.name, row.tokens)), untouched.get((row.tokens, row.layers, row.batch))
        if most is None or not row.prefill:
            continue
        goal = f"goal: {row.name}, {row.tokens:,} tokens: at most {most} times the untouched model's prefill time"
        if not dense:
            lines.append(f"{goal}; no verdict, because that was not measured")
            continue
        share = dense / row.prefill
        lines.append(f"{goal}; {share:.2f} times: {'met' if share <= most else 'missed'}")
    return lines


def _check(flags: argparse.Namespace, budget: Budget, failed: list[str], left_out: dict[str, str]) -> None:
    words = ["--device", flags.device, "--only", ",".join(_CHECKED), *(["--tiny"] if flags.tiny else [])]
    try:
        with budget.enforced():
            if gpu_check.main(words):
                failed.append("gpu_check")
    except TimeUp:
        left_out["gpu_check"] = "no time was left"


def _measured(
    measurements: Measurements, only: list[str], budget: Budget, failed: list[str], left_out: dict[str, str]
) -> list[SpeedRow]:
    """A row for each measurement that ends in time; with `only`, for those whose titles contain one of its texts."""
    rows: list[SpeedRow] = []
    titles: list[str] = []
    for each in measurements:
        titles.append(each.title)
        if only and not any(text in each.title for text in only):
            continue
        if each.seconds > budget.left:
            left_out[each.title] = f"would take some {each.seconds:.0f} s, and {budget.left:.0f} s are left"
            continue
        try:
            with budget.enforced():
                rows.append(each.run())
        except TimeUp:
            left_out[each.title] = "broken off when the time was over"
        except (OutOfMemoryError, torch.cuda.OutOfMemoryError) as error:
            left_out[each.title] = str(error).splitlines()[0]
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{each.title}: {type(error).__name__}: {error}")
        else:
            measurements.learn(rows[-1])
            print(f"{each.title}: {rows[-1].milliseconds:.2f} ms per token, {budget.spent:.0f} s in all", flush=True)
    for text in only:
        if not any(text in title for title in titles):
            print(f"--only {text}: no row has that in its title; there are {'; '.join(titles)}")
            failed.append(f"--only {text}")
    return rows


def _bound_memory(setting: Setting) -> None:
    """Limit the allocator to the memory of a smaller GPU."""
    if setting.on_gpu and setting.gpu_memory:
        total = torch.cuda.get_device_properties(setting.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, setting.gpu_memory / total), setting.device)


def _flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds on a CPU")
    parser.add_argument("--minutes", type=float, default=8.5, help="that all of it may take (default 8.5)")
    parser.add_argument("--gpu_memory", type=float, help="bound of the GPU's memory, GB (default: all of it)")
    parser.add_argument("--without_checks", action="store_true", help="measure alone")
    parser.add_argument("--only", default="", metavar="TEXT;TEXT", help="rows whose titles have one of these texts")
    parser.add_argument("--json", metavar="FILE", help="write every figure there too")
    flags = parser.parse_args(arguments)
    flags.only = [text for text in flags.only.split(";") if text]
    if flags.minutes <= 0:
        parser.error(f"--minutes {flags.minutes:g}: give more than 0")
    if torch.device(flags.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device {flags.device}: torch {torch.__version__} finds no CUDA device; on a machine without one, "
            "--device cpu --tiny measures the same on the CPU"
        )
    return flags


if __name__ == "__main__":
    sys.exit(main())
