"""What a run has measured so far, in a table and in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_speed.budget import Budget
from benchmarks.gpu_speed.goals import verdicts
from benchmarks.gpu_speed.subject import SpeedRow


@dataclass
class SpeedReport:
    """The results of a run.

    Attributes:
        machine: what it runs on.
        budget: its time.
        path: of a file that holds what is known so far; None for no file.
        rows: what was measured.
        failed: titles of what failed, with the error.
        left_out: title -> why it was not measured.
    """

    machine: dict[str, Any]
    budget: Budget
    path: Path | None
    rows: list[SpeedRow] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def keep(self) -> None:
        """Write the file anew, so that a run that is ended from outside leaves what it has measured."""
        if self.path is None:
            return
        told = {
            "machine": self.machine,
            "seconds": self.budget.spent,
            "failed": self.failed,
            "left_out": self.left_out,
            "verdicts": verdicts(self.rows),
            "rows": [asdict(row) for row in self.rows],
        }
        self.path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")

    def text(self) -> str:
        """The table, the verdicts and what was left out."""
        lines = [table(self.rows), *verdicts(self.rows)]
        lines += [f"left out: {title} ({why})" for title, why in self.left_out.items()]
        lines += [f"failed: {title}" for title in self.failed]
        counts = f"{len(self.rows)} rows, {len(self.failed)} failed, {len(self.left_out)} left out"
        return "\n".join([*lines, f"{counts}; {self.budget.spent:.0f} s"])


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
