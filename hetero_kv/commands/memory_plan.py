"""Plans the memory of a context: its size, the free memory, and the longest context that fits."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.footprint import terms
from hetero_kv.commands.injected import InjectedModel, injected_model
from hetero_kv.errors import ConfigError
from hetero_kv.models.precision import resolve_device, resolve_dtype
from hetero_kv.planning.attention_place import Decision, planned
from hetero_kv.planning.experts_place import experts_place
from hetero_kv.planning.free_memory import Limit, dram_limits, free_gpu
from hetero_kv.planning.plan import LONGEST, RESERVE, Footprint, Plan, beyond_training, resolve_max_seq_len
from hetero_kv.printing import console, json_text
from hetero_kv.rules.injection import Injection
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.speculation.speculation import tell_off
from hetero_kv.serving.speculation.ways import WAYS

LENGTHS = tuple(1024 * thousands for thousands in (4, 8, 16, 32, 64, 128, 256, 512, 1024))
GPU = "with a GPU"
CPU = "CPU alone"


def print_plan(flags: argparse.Namespace) -> int:
    """Print the plan of the command's flags; returns the exit status.

    Raises:
        OutOfMemoryError: the `max_seq_len` in force does not fit; the plan is printed nevertheless.
        HeteroKVError: a mistake in the flags or files, or a model that cannot be found.
    """
    plans, limits, in_force, place = _plans(flags, subject := injected_model(flags))
    max_seq_len = subject.injection.engine.max_seq_len
    if flags.json:
        print(json_text(_report(subject, plans, in_force, limits, place)))
    else:
        _print(console(), subject, plans, in_force, limits, place)
    # With --json only the object belongs on standard output; the error goes to standard error in either case.
    sys.stdout.flush()
    resolve_max_seq_len(max_seq_len, plans[in_force])
    return 0


def _plans(
    flags: argparse.Namespace, subject: InjectedModel
) -> tuple[dict[str, Plan], list[Limit], str, Decision | None]:
    """A plan for the CPU alone and one with a GPU, the limits of the DRAM, and the name of this machine's plan.

    The last is what `attend_on: auto` gives with a GPU; None for other settings.
    """
    injection = subject.injection
    injection.sparse_drafts = _drafts_sparsely(flags.speculation, injection)
    given_dram, given_gpu = (_gigabytes(name, getattr(flags, name)) for name in ("dram", "gpu_memory"))
    limits = dram_limits() if given_dram is None else [Limit("--dram", given_dram)]
    device = torch.device("cuda") if given_gpu is not None else resolve_device(flags.device)
    gpu = given_gpu
    if gpu is None and device.type == "cuda":
        gpu = free_gpu(str(device))
    cpu_type = resolve_dtype(flags.dtype, torch.device("cpu"))
    gpu_type = torch.bfloat16 if flags.dtype == "auto" else cpu_type
    if flags.dtype == "auto" and device.type == "cuda" and given_gpu is None:
        gpu_type = resolve_dtype("auto", device)
    on_cpu = Footprint.of(injection, dtype=cpu_type, on_gpu=False, stored=subject.stored)
    place = experts_place(injection, gpu_type, subject.stored, limits[0].free, gpu)
    length, budget = injection.context_length, injection.engine.dram_budget

    def with_gpu() -> Plan:
        footprint = Footprint.of(
            injection, dtype=gpu_type, on_gpu=True, stored=subject.stored, gpu=gpu, experts_device=place
        )
        return Plan(footprint, limits[0].free, gpu, length, budget=budget)

    attends = planned(injection, list(injection.attention_operators()), with_gpu)
    plans = {CPU: Plan(on_cpu, limits[0].free, None, length, budget=budget), GPU: with_gpu()}
    return plans, limits, GPU if device.type == "cuda" else CPU, attends


def _drafts_sparsely(way: str, injection: Injection) -> bool:
    """Whether a way to guess keeps mean keys under these rules; the log says why `sparse` does not.

    Raises ConfigError for a draft model, whose keys and values are planned when it is loaded.
    """
    if way not in WAYS:
        raise ConfigError(
            f"command line: speculation is {way!r}; plan takes {', '.join(WAYS)}. A draft model's memory is planned "
            "when it is loaded; plan it by --model, with --config dense"
        )
    if way != "sparse":
        return False
    reason = ModelForward(injection.model).why_no_sparse_drafts
    if reason is not None:
        tell_off(reason, is_chosen=True)
    return reason is None


def _gigabytes(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise ConfigError(f"command line: {name} is {text!r}; it must be a number of GB above 0")
    return int(number * 1e9)


def _report(
    subject: InjectedModel, plans: dict[str, Plan], in_force: str, limits: list[Limit], place: Decision | None
) -> dict[str, Any]:
    """The plan as plain data, sizes in bytes."""
    shown = plans[in_force]
    largest = shown.largest()
    return {
        "model": subject.name,
        "config": subject.rules,
        "context_length": shown.context_length,
        "max_seq_len": subject.injection.engine.max_seq_len,
        "bytes_per_token": {**asdict(shown.footprint.bytes_per_token), "total": shown.footprint.bytes_per_token.total},
        "free_dram": shown.dram,
        "free_dram_limits": [limit._asdict() for limit in limits],
        "free_gpu": plans[GPU].gpu,
        "reserve": RESERVE,
        "computes_on": "gpu" if in_force == GPU else "cpu",
        "attend_on": None if place is None else str(place),
        "largest_max_seq_len": largest,
        "auto_max_seq_len": min(largest, shown.context_length),
        "lengths": {
            length: {
                "gpu" if name == GPU else "cpu": {
                    "dram": plan.dram_needed(length),
                    "gpu": plan.gpu_needed(length),
                    "fits": _verdict(plan, length),
                    **plan.footprint.memory(length).by_name(),
                }
                for name, plan in plans.items()
            }
            for length in LENGTHS
        },
    }


def _verdict(plan: Plan, tokens: int) -> bool | None:
    """Whether a context fits; None if it fits the DRAM and nothing is known of the GPU."""
    if plan.fits(tokens):
        return None if plan.footprint.on_gpu and plan.gpu is None else True
    return False


def _print(
    terminal: Console, subject: InjectedModel, plans: dict[str, Plan], in_force: str, limits: list[Limit],
    place: Decision | None,
) -> None:  # fmt: skip
    shown = plans[in_force]
    model = subject.injection.model
    model_class, layers = type(model).__name__, attention_module.text_config(model).num_hidden_layers
    terminal.print(
        f"[bold]{escape(subject.name)}[/bold] ({model_class}, {layers} layers) with {escape(subject.rules)}",
        soft_wrap=True,
    )
    terminal.print(_shapes(shown.footprint), style="dim", highlight=False, soft_wrap=True)
    terminal.print(_table(plans))
    token = shown.footprint.bytes_per_token
    terminal.print(
        f"Bytes per token in DRAM: {token.total:,.0f} = keys {token.keys:,.0f} + values {token.values:,.0f} + "
        f"representatives {token.representatives:,.0f}",
        highlight=False,
        soft_wrap=True,
    )
    terminal.print(_free(plans, limits), highlight=False, soft_wrap=True)
    if place is not None:
        text = f"attend_on: auto, {GPU}: {place}"
        terminal.print(text, markup=False, highlight=False, soft_wrap=True)
    largest = shown.largest()
    most = "any" if largest >= LONGEST else f"{largest:,}"
    terminal.print(
        f"Largest max_seq_len, {in_force}, with {RESERVE:.0%} of the free memory, less the weights, in reserve: "
        f"[bold]{most}[/bold]; "
        f"the model was trained for {shown.context_length:,}, so auto is {min(largest, shown.context_length):,}",
        highlight=False,
        soft_wrap=True,
    )
    max_seq_len = subject.injection.engine.max_seq_len
    tokens = min(largest, shown.context_length) if max_seq_len == "auto" else int(max_seq_len)
    if warning := beyond_training(tokens, shown.context_length):
        terminal.print(f"max_seq_len: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    terminal.print(_breakdown(shown, in_force, tokens))


def _shapes(footprint: Footprint) -> str:
    """The layers by their storage, e.g. "32 layers in DRAM blocks of 128 tokens: 8 kv heads, keys 128, values 128"."""
    counts: dict[str, int] = {}
    for layer in footprint.layers:
        shape = layer.shape
        heads = f": {shape.kv_heads} kv heads, keys {shape.k_dim}, values {shape.v_dim}" if shape.kv_heads else ""
        line = f"{layer.place}{heads}"
        counts[line] = counts.get(line, 0) + 1
    return "\n".join(f"{count} layers {line}" for line, count in counts.items())


def _table(plans: dict[str, Plan]) -> Table:
    cpu, gpu = plans[CPU], plans[GPU]
    table = Table(
        title="memory in GB (10^9 bytes)",
        caption="✓ fits with the reserve, ✗ does not fit, ? unknown",
        title_justify="left",
        caption_justify="left",
    )
    for heading in (
        "tokens",
        "keys and\nvalues",
        "represen-\ntatives",
        f"{CPU},\n{_number_type(cpu)}:\nDRAM",
        f"{GPU},\n{_number_type(gpu)}:\nDRAM",
        "\n\nGPU",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for length in LENGTHS:
        memory = gpu.footprint.memory(length)
        table.add_row(
            _thousands(length),
            f"{memory.keys_values / 1e9:,.2f}",
            f"{memory.representatives / 1e9:,.2f}",
            _marked(cpu.dram_needed(length), cpu.fits_dram(length)),
            _marked(gpu.dram_needed(length), gpu.fits_dram(length)),
            _marked(gpu.gpu_needed(length), gpu.fits_gpu(length) if gpu.gpu is not None else None),
        )
    return table


def _marked(size: int, fits: bool | None) -> str:
    mark = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "?"}[fits]
    return f"{size / 1e9:,.2f} {mark}"


def _number_type(plan: Plan) -> str:
    return f"{8 * plan.footprint.element}-bit"


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 1 << 20 else f"{tokens >> 20}M"


def _free(plans: dict[str, Plan], limits: list[Limit]) -> str:
    gpu = plans[GPU].gpu
    on_gpu = "no GPU" if gpu is None else f"GPU {gpu / 1e9:.2f} GB"
    others = ", ".join(f"{limit.name} {limit.free / 1e9:.2f} GB" for limit in limits[1:])
    bounds = f" ({limits[0].name}{f'; {others}' if others else ''})"
    return f"Free: DRAM {limits[0].free / 1e9:.2f} GB{bounds}; {on_gpu}"


def _breakdown(plan: Plan, name: str, tokens: int) -> Table:
    """The memory's terms at one length, by place."""
    memory = plan.footprint.memory(tokens)
    table = Table(title=f"at max_seq_len {tokens:,}, {name}", title_justify="left")
    table.add_column("term")
    table.add_column("device")
    table.add_column("GB", justify="right")
    for term in terms():
        if size := memory.sizes.get(term):
            place = "GPU" if plan.footprint.on_gpu and not term.in_dram else "DRAM"
            table.add_row(term.meaning, place, f"{size / 1e9:,.2f}")
    return table
