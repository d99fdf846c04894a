"""The engines that `benchmarks.peers` compares: this project's, untouched transformers and llama.cpp."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import GIVEN_ENVIRONMENT
from benchmarks.timing import seconds
from hetero_kv import HeteroCache, inject, open_model, with_rules
from hetero_kv.models import load_model
from hetero_kv.models.locating import locate

DECODED = 8
"""Decoded tokens per round."""
_BENCH_TOKENS = 32
BUDGET = 2048
OURS = {
    "dense": ("dense", {}),
    # Sink 32, recent window 512, and 47 pages of 32 chosen by Quest's scores in every layer: 2,048 tokens.
    "sparse": (
        "quest",
        {"block_size": 32, "sink_tokens": 32, "local_windows_len": 512, "top_k_blocks": 47, "dense_layer_num": 0},
    ),
}
_COMMON = {"kv_type": "FP16", "chunk_size": 2048}
LLAMA, TRANSFORMERS = "llama.cpp", "transformers"


@dataclass
class EngineSpeed:
    """An engine's speed at one length: seconds per decoded token of every row, and prefill tokens per second."""

    engine: str
    length: int
    decode: float
    prefill: float


class HeteroKVEngine:
    """This project's engine under one recipe, whose weights stay packed; all recipes share those of the first.

    Every one of `rows` conversations has the same prompt.
    """

    def __init__(self, model: str, name: str, longest: int, first: HeteroKVEngine | None, rows: int = 1) -> None:
        self.rows = rows
        config, settings = OURS[name]
        settings = {**_COMMON, **settings, "max_seq_len": longest}
        if first is None:
            opened = open_model(model)
            inject(opened.model, config, command_line=settings)
            self.loaded = opened.load()
            self.loaded.model.hetero_kv_injection.compile_kernels()
        else:
            self.loaded = with_rules(first.loaded, config, **settings)
        self.model = self.loaded.model
        self.cache: Any = None

    @torch.no_grad()
    def prefill(self, ids: list[int]) -> float:
        """Seconds of a prefill from nothing."""
        self.cache = None
        self.cache = HeteroCache(self.model)
        prompts = torch.tensor([ids] * self.rows)
        return seconds(lambda: self.model(prompts, past_key_values=self.cache, logits_to_keep=1))

    @torch.no_grad()
    def decode(self, ids: list[int]) -> float:
        """Seconds per token of every row; rows get different tokens, as conversations do."""
        tokens = [torch.tensor([[token + row] for row in range(self.rows)]) for token in ids]
        return seconds(lambda: [self.model(token, past_key_values=self.cache) for token in tokens]) / len(ids)


class Untouched:
    """transformers alone: unpacked weights, its own cache, prompts in chunks."""

    def __init__(self, model: str) -> None:
        self.model = load_model(model).model
        self.cache: Any = None

    @torch.no_grad()
    def prefill(self, ids: list[int]) -> float:
        """Seconds of a prefill from nothing."""
        self.cache = DynamicCache()
        parts = torch.tensor([ids]).split(_COMMON["chunk_size"], dim=1)  # type: ignore[arg-type]
        return seconds(lambda: [self.model(part, past_key_values=self.cache, logits_to_keep=1) for part in parts])

    @torch.no_grad()
    def decode(self, ids: list[int]) -> float:
        """Seconds per token."""
        tokens = [torch.tensor([[token]]) for token in ids]
        return seconds(lambda: [self.model(token, past_key_values=self.cache) for token in tokens]) / len(ids)


class LlamaCpp:
    """llama.cpp in a separate process."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        path = locate(model, None, None).gguf
        assert path is not None
        self.path, self.threads = str(path), threads
        worker = str(Path(__file__).with_name("llama_worker.py"))
        self.process = subprocess.Popen(
            [python, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=GIVEN_ENVIRONMENT,
        )  # fmt: skip

    def ask(self, **command: Any) -> float:
        """Seconds that a command took. Raises RuntimeError when the process is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"llama.cpp ended at {list(command)}; is llama-cpp-python installed for its Python?")
        return float(json.loads(answer)["seconds"])

    def prefill(self, ids: list[int]) -> float:
        """Seconds of a prefill with an empty cache, which has room for the decoded tokens."""
        self.ask(model=self.path, context=len(ids) + 512, threads=self.threads)
        return self.ask(prefill=ids)

    def decode(self, ids: list[int]) -> float:
        """Seconds per token."""
        return self.ask(decode=ids) / len(ids)


class LlamaBench:
    """llama.cpp's program `llama-batched-bench`."""

    def __init__(self, program: Path, model: str, threads: int, rows: int = 1) -> None:
        path = locate(model, None, None).gguf
        assert path is not None
        self.program, self.path, self.threads, self.rows = program, path, threads, rows

    def speed(self, length: int) -> EngineSpeed:
        """The speed at one length. Raises RuntimeError where the program gives no result."""
        command = [
            self.program, "-m", self.path, "-c", self.rows * (length + 256), "-b", _COMMON["chunk_size"], "-npp",
            length, "-ntg", _BENCH_TOKENS, "-npl", self.rows, "-t", self.threads, "-fa", "on", "--output-format",
            "jsonl",
        ]  # fmt: skip
        environment = GIVEN_ENVIRONMENT | {"LD_LIBRARY_PATH": str(self.program.parent)}
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
        if ended.returncode or not lines:
            raise RuntimeError(f"{self.program} ended with status {ended.returncode}: {ended.stderr[-500:]}")
        result = json.loads(lines[-1])
        return EngineSpeed(LLAMA, length, self.rows / result["speed_tg"], result["speed_pp"])
