"""Settings of a server of several replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_kv.errors import ConfigError
from hetero_kv.settings.setting import Settings, setting


@dataclass(frozen=True)
class ClusterSettings(Settings):
    """A cluster: how many replicas answer, and with what."""

    replicas: int | Literal["auto"] = setting(
        "auto",
        "processes with an engine; auto: from 1 to most_replicas, by the tokens and requests that wait",
        minimum=1,
    )
    most_replicas: int = setting(8, "the most replicas under auto", minimum=1)
    replica_cpus: float = setting(1.0, "CPU cores of a replica, which its threads use", minimum=0.0)
    replica_gpus: float = setting(0.0, "GPUs of a replica", minimum=0.0)
    prefill_replicas: int = setting(
        0,
        "further replicas that compute long prompts alone and save them in the context folder, from which the others "
        "go on; it must be shared",
        minimum=0,
    )
    prefill_tokens: int = setting(
        4096, "tokens that are new in a prompt from which on a prefill replica computes it", minimum=1
    )
    report_s: float = setting(0.5, "time between two reports of a replica to routers", unit="seconds", minimum=0.1)
    silent_s: float = setting(
        60.0,
        "time without a sign of life after which a replica is given up: its answers go on elsewhere, and Ray replaces "
        "it",
        unit="seconds",
        minimum=1,
    )

    def validate(self) -> None:
        """See `Settings`."""
        if self.replica_cpus and self.replica_cpus < 1:
            raise ConfigError(f"replica_cpus is {self.replica_cpus}; give whole cores, at least 1, or 0 for no share")
