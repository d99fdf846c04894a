"""The settings of the engine, independent of the operators; their names follow KTransformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil

from hetero_kv.cpus import threads_by_environment, usable_cpus
from hetero_kv.settings.setting import Settings, setting

AUTO, GPU, DRAM = "auto", "gpu", "dram"


@dataclass(frozen=True)
class EngineSettings(Settings):
    """What the engine is given, whatever the operators are."""

    chunk_size: int = setting(4096, "prefill chunk", unit="tokens", minimum=1)
    max_seq_len: int | Literal["auto"] = setting(
        "auto",
        "capacity of the KV store; auto: what the model was made for, or what fits into the DRAM that is free and that "
        "no other cache of the process is to have; several that have no tokens yet share it equally",
        unit="tokens",
        minimum=1,
    )
    threads_num: int | Literal["auto"] = setting(
        "auto",
        "CPU threads, as far as the process has CPUs, by its affinity and its container's quota; auto: the physical "
        "cores, or OMP_NUM_THREADS where that is set",
        minimum=1,
        aliases=("cpu_infer",),
    )
    attention_backend: str = setting(
        AUTO,
        "what computes dense attention on a GPU: torch's flash kernel, the package flash-attn, Triton, or torch alone; "
        "auto: torch's flash kernel, and the next of them that computes it for soft-capping, windows and float32; "
        "Triton for decoded tokens beside blocks in DRAM",
        choices=(AUTO, "flash_attn", "triton", "torch"),
    )
    hidden_device: str = setting(
        AUTO,
        "where a prompt's hidden states lie between the layers of a model on a GPU; auto: in DRAM beyond two chunks",
        choices=(AUTO, GPU, DRAM),
    )
    weights_device: str = setting(
        AUTO,
        "where the weights of a model on a GPU lie; dram: those of its layers in DRAM, copied a layer ahead; auto: "
        "there, where the GPU has no room for all",
        choices=(AUTO, GPU, DRAM),
    )
    cuda_graphs: str = setting(
        AUTO,
        "whether what a decoded token asks of a GPU between two attentions is captured and launched as a whole; auto: "
        "where it can be; on: refused where it cannot",
        choices=(AUTO, "on", "off"),
    )
    measure_recall: bool = setting(
        False, "measure the share of the full attention mass that the attended blocks cover (slow)"
    )

    def resolved_threads(self) -> int:
        """CPU threads to start: `threads_num`, at most the CPUs that the process may use (affinity and quota).

        For auto: the environment's (OMP_NUM_THREADS), or the number of physical cores.
        """
        usable = usable_cpus()
        if self.threads_num != "auto":
            return min(self.threads_num, usable)
        # Virtual machines and some ARM systems do not report their physical cores.
        return threads_by_environment() or min(psutil.cpu_count(logical=False) or usable, usable)
