"""Speed of the engine on this machine's GPU: one command, under eight minutes, no network, no model files.

    python -m benchmarks.gpu [--json FILE] [--minutes 7.9] [--gpu_memory 24] [--without_checks] [--only TEXT;TEXT]
    python -m benchmarks.gpu --device cpu --tiny        # everything at sizes that take seconds on a CPU

First the checks of exactness, sets, sparse prefill, `attend_on: gpu` and kernels of `benchmarks.gpu_check`; then, with
random weights of the shape of Llama 3.1 8B in bfloat16:

- decoding after a million random keys and values, in 8 of the 32 layers (`adaptive_lean` with `attend_on: gpu`, and
  `quest`)
- decoding after 128K and 32K random keys and values: `adaptive` and `quest` with `attend_on: gpu`, and their peers,
  which have all keys and values in GPU memory and decode a token as one CUDA graph: the untouched model with
  transformers' static cache, and with torch's flash decoding or flex attention
- 16 requests of 128K tokens (`quest` with `attend_on: gpu`, as fine as they fit into DRAM), and full attention at the
  largest batch that fits into GPU memory
- decoding after 32K and 128K random keys and values by the CPU (`quest`), and at 128K with `attend_on: split` and with
  `index_device: gpu`
- prefill and decode at 32K tokens: the untouched model, `ktransformers`, `shadowkv`; at 128K as time allows, with a
  sparse prefill too (`minference`; a random model's heads take the largest pattern)
- ShadowKV by batch at 16K tokens, compared with the untouched model
- prefill and decode at 32K tokens with weights packed in Q4_0 (`ktransformers`)

and for each step the parts of the host's time. A measurement that would exceed the time is skipped, and one that does
is aborted; the output says so, and names a peer that cannot run here with what it lacks. FILE is written anew after
every row, and a process that is asked to end prints what it has. Tokens/s and milliseconds are medians over decoded
tokens, with a synchronisation after each. Rows with a goal have a verdict behind the table. The exit status is 1 if a
check or a measurement fails. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

import torch

from benchmarks import gpu_check
from benchmarks.gpu_checks.setting import Setting
from benchmarks.gpu_speed.attention_peers import PeerUnavailable
from benchmarks.gpu_speed.budget import Budget, TimeUp
from benchmarks.gpu_speed.measurements import Measurements
from benchmarks.gpu_speed.report import SpeedReport
from hetero_kv.errors import OutOfMemoryError

_CHECKED = ("exactness", "sets", "sparse", "resident", "kernels")


def main(arguments: list[str] | None = None) -> int:
    """Check and measure; returns the exit status."""
    flags = _flags(arguments)
    budget = Budget(60 * flags.minutes)
    setting = Setting(torch.device(flags.device), flags.tiny, 0, int(flags.gpu_memory * 1e9) if flags.gpu_memory else 0)
    _bound_memory(setting)
    machine = gpu_check.machine(setting)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    report = SpeedReport(machine, budget, Path(flags.json) if flags.json else None)
    if not flags.without_checks:
        _check(flags, report)
    _measure(Measurements(setting), flags.only, report)
    print(report.text())
    report.keep()
    return 1 if report.failed else 0


def _check(flags: argparse.Namespace, report: SpeedReport) -> None:
    words = ["--device", flags.device, "--only", ",".join(_CHECKED), *(["--tiny"] if flags.tiny else [])]
    try:
        with report.budget.enforced():
            if gpu_check.main(words):
                report.failed.append("gpu_check")
    except TimeUp:
        report.left_out["gpu_check"] = "no time was left"
    report.keep()


def _measure(measurements: Measurements, only: list[str], report: SpeedReport) -> None:
    """A row for each measurement that ends in time; with `only`, for those whose titles contain one of its texts."""
    titles: list[str] = []
    for each in measurements:
        titles.append(each.title)
        if only and not any(text in each.title for text in only):
            continue
        if each.seconds > report.budget.left:
            left = report.budget.left
            report.left_out[each.title] = f"would take some {each.seconds:.0f} s, and {left:.0f} s are left"
            continue
        try:
            with report.budget.enforced():
                row = each.run()
        except TimeUp:
            report.left_out[each.title] = "broken off when the time was over"
        except (OutOfMemoryError, torch.cuda.OutOfMemoryError) as error:
            report.left_out[each.title] = str(error).splitlines()[0]
        except PeerUnavailable as error:
            report.left_out[each.title] = f"cannot run here: {error}"
        except Exception as error:
            traceback.print_exc()
            report.failed.append(f"{each.title}: {type(error).__name__}: {error}")
        else:
            report.rows.append(row)
            measurements.learn(row)
            print(f"{each.title}: {row.milliseconds:.2f} ms per token, {report.budget.spent:.0f} s in all", flush=True)
        report.keep()
    for text in only:
        if not any(text in title for title in titles):
            print(f"--only {text}: no row has that in its title; there are {'; '.join(titles)}")
            report.failed.append(f"--only {text}")


def _bound_memory(setting: Setting) -> None:
    """Limit the allocator to the memory of a smaller GPU."""
    if setting.on_gpu and setting.gpu_memory:
        total = torch.cuda.get_device_properties(setting.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, setting.gpu_memory / total), setting.device)


def _flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds on a CPU")
    parser.add_argument("--minutes", type=float, default=7.9, help="that all of it may take (default 7.9)")
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
