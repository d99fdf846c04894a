"""Checks that the engine computes exactly and fits on this machine's GPU: one command, a few minutes, no network.

    python -m benchmarks.gpu_check [--json FILE] [--only exactness,...] [--tokens 131072] [--gpu_memory 24]
    python -m benchmarks.gpu_check --device cpu --tiny        # everything at sizes that take seconds on a CPU

- exactness: prefill and decode of every operator against full attention, with covering budgets, in fp16 and bf16
- sets: ShadowKV's landmarks, outliers and chosen chunks against a plain reference
- sparse: the keys that a sparse prefill chooses, and its attention, against a CPU's
- resident: `attend_on: gpu` and `auto` with the recipes quest, ktransformers, adaptive, adaptive_lean and retroinfer,
  and `attend_on: split` and `index_device: gpu` with the first two, against the CPU's route; `attend_on: gpu` with
  covering budgets against full attention
- experts: a mixture's experts in DRAM, computed by the CPU or streamed to the GPU, against those on the GPU
- kernels: each Triton kernel (merging, rebuilding, gathering, prompts' attention, dense and sparse, column sums, the
  choice of single tokens, packed weights in every format) against the torch function that defines it, and the time of
  both
- long_prompt: 128K tokens through random weights of the shape of Llama 3.1 8B, within 24 GB of GPU memory, with the
  recipes ktransformers, quest and shadowkv: memory, prefill tokens/s, time per decoded token

A line per check: "pass", "FAIL", or "----" if it needs a GPU and there is none. The exit status is 1 if one fails.
GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from benchmarks.gpu_checks import chosen_sets, exactness, experts, kernels, long_prompt, resident, sparse_sets
from benchmarks.gpu_checks.setting import Check, CheckResult, Setting

CHECKS: dict[str, Check] = {
    "exactness": exactness.check,
    "sets": chosen_sets.check,
    "sparse": sparse_sets.check,
    "resident": resident.check,
    "experts": experts.check,
    "kernels": kernels.check,
    "long_prompt": long_prompt.check,
}
_VERDICTS = {True: "pass", False: "FAIL", None: "----"}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; returns the exit status."""
    flags = _flags(arguments)
    tokens = flags.tokens or (400 if flags.tiny else 131_072)
    setting = Setting(torch.device(flags.device), flags.tiny, tokens, int(flags.gpu_memory * 1e9))
    described = machine(setting)
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    start, found = time.perf_counter(), []
    for group in flags.only:
        for result in _results(group, setting):
            print(f"{_VERDICTS[result.passed]}  {group}: {result.name} \N{EM DASH} {result.detail}", flush=True)
            found.append({"group": group, **asdict(result)})
    failed = sum(result["passed"] is False for result in found)
    took = time.perf_counter() - start
    passed, left_out = sum(r["passed"] is True for r in found), sum(r["passed"] is None for r in found)
    print(f"{passed} passed, {failed} failed, {left_out} left out; {took:.0f} s")
    if flags.json:
        report = {"machine": described, "seconds": took, "failed": failed, "checks": found}
        Path(flags.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _results(group: str, setting: Setting) -> Iterator[CheckResult]:
    """The results of a group; an error ends this group as a failure, and no other group."""
    try:
        yield from CHECKS[group](setting)
    except Exception as error:
        traceback.print_exc()
        yield CheckResult(group, False, f"ended by {type(error).__name__}: {error}")


def _flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds on a CPU")
    parser.add_argument("--tokens", type=int, help="of the long prompt (default 131072)")
    parser.add_argument("--gpu_memory", type=float, default=24.0, help="that the long prompt may take, GB (default 24)")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"some of {','.join(CHECKS)}, with commas between")
    parser.add_argument("--json", metavar="FILE", help="write every figure there too")
    flags = parser.parse_args(arguments)
    flags.only = flags.only.split(",")
    if unknown := [name for name in flags.only if name not in CHECKS]:
        parser.error(f"--only: there is no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if torch.device(flags.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device {flags.device}: torch {torch.__version__} finds no CUDA device; on a machine without one, "
            "--device cpu --tiny runs the same checks on the CPU"
        )
    return flags


def machine(setting: Setting) -> dict[str, str]:
    """The device, and the versions of the libraries."""
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if not setting.on_gpu:
        return {"device": str(setting.device), **versions}
    properties = torch.cuda.get_device_properties(setting.device)
    return {"device": f"{properties.name} ({properties.total_memory / 1e9:.0f} GB)", **versions}


if __name__ == "__main__":
    sys.exit(main())
