"""The settings of the engine, independent of the operators; their names follow KTransformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil

from hetero_kv.cpus import threads_by_environment, usable_cpus
from hetero_kv.settings.setting import Settings, setting

AUTO, GPU, DRAM, CPU, SPLIT = "auto", "gpu", "dram", "cpu", "split"


@dataclass(frozen=True)
class EngineSettings(Settings):
    """The engine's settings, independent of the operators."""

    chunk_size: int = setting(4096, "prefill chunk", unit="tokens", minimum=1)
    max_seq_len: int | Literal["auto"] = setting(
        "auto",
        "capacity of the KV store; auto: the model's context length, or less if the free DRAM is smaller; other "
        "caches' reservations are not free, and caches without tokens share the free DRAM equally",
        unit="tokens",
        minimum=1,
    )
    dram_budget_gb: float | Literal["auto"] = setting(
        "auto",
        "the most DRAM that all caches of a process may keep together with one of this model, GB; `max_seq_len` and "
        "the engine's store are planned within it; auto: what is free",
        minimum=0,
    )
    threads_num: int | Literal["auto"] = setting(
        "auto",
        "CPU threads, at most the process's CPUs by affinity and container quota; auto: the physical cores, or "
        "OMP_NUM_THREADS if it is set",
        minimum=1,
        aliases=("cpu_infer",),
    )
    attention_backend: str = setting(
        AUTO,
        "kernels of dense attention on a GPU: torch's flash kernel, the package flash-attn, Triton, or torch alone; "
        "auto: the first of these that supports the model's soft-capping, windows and dtype; Triton for decoded tokens "
        "with blocks in DRAM",
        choices=(AUTO, "flash_attn", "triton", "torch"),
    )
    hidden_device: str = setting(
        AUTO,
        "where a prompt's hidden states are between the layers of a model on a GPU; auto: in DRAM beyond two chunks",
        choices=(AUTO, GPU, DRAM),
    )
    weights_device: str = setting(
        AUTO,
        "where the weights of a model on a GPU are; dram: the layers' weights in DRAM, copied one layer ahead; auto: "
        "in DRAM if they do not fit into the GPU's memory",
        choices=(AUTO, GPU, DRAM),
    )
    experts_device: str = setting(
        AUTO,
        "where the experts of a mixture on a GPU are; dram: in DRAM, where the CPU computes decoded tokens and short "
        "prompts through them, while long prompts read them to the GPU; auto: on the GPU if all weights and a context "
        "of max_seq_len tokens fit there, else in DRAM if everything fits then",
        choices=(AUTO, GPU, DRAM),
    )
    packed_cache_gb: float = setting(
        50.0,
        "GB on the disk for packed weights of GGUF files, which later starts read instead of packing them again; the "
        "least recently used are removed first; 0: none are kept",
        minimum=0,
    )
    cuda_graphs: str = setting(
        AUTO,
        "whether a decoded token's kernels between two attentions are captured as CUDA graphs; auto: if possible; on: "
        "refuse if impossible",
        choices=(AUTO, "on", "off"),
    )
    attend_on: str = setting(
        CPU,
        "what attends to the Context for a model on a GPU, under `RetrievalAttention` and `retroinfer`; gpu: what "
        "blocks or tokens are chosen by, and the chosen ones, lie on the GPU, which reads missing ones from DRAM "
        "without waiting for the host; layers that attend to everything have all keys and values there "
        "(top_k_blocks: all, dense_layer_num); split: as gpu, but of missing blocks the CPU attends to as many as, by "
        "the read rates that "
        "the first context measures, take as long as the others over the bus; it waits once per layer that chooses "
        "blocks; auto: on the GPU if it can, if a context of max_seq_len tokens fits there then, and if, by "
        "the read rates that the first context measures, a token waits no longer for the bus than for the CPU",
        choices=(AUTO, GPU, SPLIT, CPU),
    )
    index_device: str = setting(
        AUTO,
        "where blocks are scored for a model on a GPU, under `RetrievalAttention`; gpu: what they are chosen by lies "
        "there, and the CPU gets the list with the query where it attends to the blocks; auto: where attend_on is",
        choices=(AUTO, GPU, CPU),
    )
    measure_recall: bool = setting(
        False, "measure the share of the full attention mass that the attended blocks cover (slow)"
    )

    @property
    def dram_budget(self) -> int | None:
        """`dram_budget_gb` in bytes; None: what is free."""
        return None if isinstance(self.dram_budget_gb, str) else round(self.dram_budget_gb * 1e9)

    def resolved_threads(self) -> int:
        """CPU threads to start: `threads_num`, at most the CPUs that the process may use (affinity and quota).

        For auto: the environment's (OMP_NUM_THREADS), or the number of physical cores.
        """
        usable = usable_cpus()
        if self.threads_num != "auto":
            return min(self.threads_num, usable)
        # Virtual machines and some ARM systems do not report their physical cores.
        return threads_by_environment() or min(psutil.cpu_count(logical=False) or usable, usable)
