"""Memory and time per token of a 7B model in Q4_K with a context of 32K tokens.

    python -m benchmarks.seven_billion --folder DIRECTORY [--tokens 32768] [--kv_types Q4_0,Q8_0,FP16] [--recipe dense]
                                       [--layers 28]

Writes a GGUF file of Qwen2-7B's shape with random Q4_K weights (4.3 GB; matrices share their bytes) into the directory,
loads it in a process per storage type like any model, and removes it at the end. Prefilling 32K tokens takes hours on
few cores, so every layer stores random keys and values instead, by the call with which an operator continues a recorded
prefill. The answer's queries score these keys as a real model's do (`benchmarks.attention_scores`). A question of 16
tokens and some decoded tokens follow; with `--tokens 1024` these take little more than their weights. "Peak" is the
process's largest resident memory, including the interpreter and its libraries; the C library returns freed memory at
once, as in `benchmarks.prefill_memory`, until the first tokens are decoded. It keeps freed memory, as by default, while
the others are timed. A prefill needs additional memory, which `hetero-kv plan` shows; with fewer layers, contexts of a
million tokens fit, whose tokens take a layer's time and the rest's, as runs of two depths tell.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.prefill_memory import RETURN_AT_ONCE
from benchmarks.timing import seconds

#: Deviations of a prompt's attention scores, and the shares of their variance between runs of RUN tokens, of twelve
#: query heads of a real prefill (the default model's).
SCORES = (
    (2.1, 0.24), (2.4, 0.20), (2.7, 0.46), (2.9, 0.33), (3.1, 0.37), (3.3, 0.45), (3.4, 0.63), (3.7, 0.73),
    (3.9, 0.55), (4.1, 0.65), (4.6, 0.72), (6.1, 0.21),
)  # fmt: skip
RUN = 32
# The base of the rotation; how many of the slowest pairs of numbers queries have in common, and how large these are.
_BASE, _SLOW, _BIAS = 1e6, 24, 8.0
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 3584, 18944, 28, 28, 4, 128, 152_064
GOAL = 6e9
QUESTION, FIRST, ANSWER = 16, 3, 9
"""Tokens of the question, of the answer's start, which load kernels and libraries, and of its rest, which are timed."""
# Options of `mallopt` in the GNU C library, and from how many bytes on it returns freed memory at most by default.
_TRIM, _MMAP, _MOST_KEPT = -1, -3, 1 << 25
_ROWS = {
    "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN), "attn_v": (KV_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * DIM), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}  # fmt: skip


def write_model(path: Path, layers: int) -> None:
    """Write the file of a model with that many layers."""
    import gguf
    from tokenizers import pre_tokenizers

    kind, generator = gguf.GGMLQuantizationType.Q4_K, np.random.default_rng(0)
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (VOCABULARY * HIDDEN // columns, size), np.uint8)
    # Weights of mean 0 and deviation 0.02: codes are 7.5 scales above the minimum on average.
    blocks[:, :4] = np.array([1e-4, 7.5e-4], np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(_BASE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(len(tokens) - 1)

    def add_matrix(name: str, rows: int, width: int) -> None:
        data = blocks[: rows * width // columns].reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    for name in ("token_embd", "output"):
        add_matrix(name, VOCABULARY, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(layers):
        for name, shape in _ROWS.items():
            add_matrix(f"blk.{layer}.{name}", *shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
        for name in ("attn_q", "attn_k", "attn_v"):
            bias = query_bias(layer) if name == "attn_q" else 0.1 * generator.standard_normal(_ROWS[name][0])
            writer.add_tensor(f"blk.{layer}.{name}.bias", bias.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def query_bias(layer: int) -> np.ndarray:
    """What all queries of a kv head have in common, [HEADS * DIM], in numbers that rotate little within an answer."""
    bias = np.zeros((KV_HEADS, 2, DIM // 2))
    slow = bias[:, :, -_SLOW:]
    slow[:] = _BIAS * np.random.default_rng(layer).standard_normal(slow.shape)
    return np.repeat(bias.reshape(KV_HEADS, DIM), HEADS // KV_HEADS, axis=0).ravel()


def rotated_bias(layer: int, position: int) -> torch.Tensor:
    """`query_bias` of each kv head at a position, [KV_HEADS, DIM]."""
    first, second = query_bias(layer).reshape(KV_HEADS, -1, 2, DIM // 2)[:, 0].transpose(1, 0, 2)
    angles = position * _BASE ** (-np.arange(DIM // 2) / (DIM // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    return torch.from_numpy(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)).float()


class SevenBillionPrompt:
    """Keys and values in place of a prefilled prompt (`hetero_kv.engine.recorded_prompt.RecordedPrompt`).

    They are random, but the queries behind them score the keys of each head as a real model's do (`SCORES`).
    """

    rotation = None

    def __init__(self, tokens: int, dtype: torch.dtype, layer: int) -> None:
        generator = torch.Generator().manual_seed(layer)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.length = tokens
        self.values = normal(1, KV_HEADS, tokens, DIM).to(dtype)
        queries = rotated_bias(layer, tokens)
        heads = [SCORES[(layer * KV_HEADS + head) % len(SCORES)] for head in range(KV_HEADS)]
        deviations, shares = (torch.tensor(each)[:, None] for each in zip(*heads, strict=True))
        runs = normal(KV_HEADS, -(-tokens // RUN)).repeat_interleave(RUN, dim=1)[:, :tokens]
        scores = deviations * (shares.sqrt() * runs + (1 - shares).sqrt() * normal(KV_HEADS, tokens))
        keys = normal(KV_HEADS, tokens, DIM)
        square = queries.square().sum(1)[:, None]
        change = (scores * DIM**0.5 - torch.bmm(keys, queries[:, :, None])[..., 0]) / square
        self.keys = keys.add_(change[..., None] * queries[:, None])[None].to(dtype)

    def show_last_queries(self, observation: Any) -> None:
        """Raise RuntimeError: there are no queries."""
        raise SystemExit("random keys come without queries; give a recipe that watches none, dense or quest")


def fill(cache: Any, injection: Any, tokens: int, dtype: torch.dtype) -> None:
    """Store keys and values of `tokens` tokens in every layer."""
    operators = {operator.layer_idx: operator for operator in injection.attention_operators()}
    with cache.forward(cache.plan_batch([tokens], tokens), is_decode=False) as batch:
        (step,) = batch.steps
        for index, operator in operators.items():
            operator.load_prefill(step.group.layers[index], step, SevenBillionPrompt(tokens, dtype, index))
    cache.columns = cache.columns.grown(tokens, [tokens])


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def measured(path: str, tokens: int, kv_type: str, recipe: str) -> dict[str, float]:
    """Load the file in this process, fill a context, answer: bytes and seconds."""
    from hetero_kv import HeteroCache, inject, open_model
    from hetero_kv.adapter.loaded_weights import LoadedWeights
    from hetero_kv.planning import plan

    # The plan counts the hidden states of a prompt, and none is prefilled here.
    plan.free_dram = lambda: 1 << 60
    opened = open_model(path, device="cpu", progress=lambda *progress: None)
    injection = inject(opened.model, recipe, command_line={"kv_type": kv_type, "max_seq_len": tokens})
    model = opened.load().model
    loaded = peak_bytes()
    with torch.no_grad():
        injection.compile_kernels()
        cache = HeteroCache(model, tokens)
        fill(cache, injection, tokens - QUESTION - FIRST - ANSWER, model.dtype)
        ids = torch.randint(0, VOCABULARY, (1, QUESTION), generator=torch.Generator().manual_seed(0))

        def forward() -> None:
            nonlocal ids
            ids = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

        question = seconds(forward)
        for _ in range(FIRST):
            forward()
        peak = peak_bytes()
        keep_freed_memory()
        token = statistics.median(seconds(forward) for _ in range(ANSWER))
    return {
        "weights": LoadedWeights.of(model).size,
        "loaded": loaded,
        "stored_tokens": cache.get_seq_length(),
        "peak": peak,
        "question": question,
        "token": token,
    }


def keep_freed_memory() -> None:
    """Let the GNU C library reuse freed memory, as it does by default; others have nothing to undo."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP, _MOST_KEPT)
        library.mallopt(_TRIM, 2 * _MOST_KEPT)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the file is written; 4.3 GB are needed there")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--kv_types", default="Q4_0,Q8_0,FP16")
    parser.add_argument("--recipe", default="dense")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        path, kv_type = arguments.measure
        print(json.dumps(measured(path, arguments.tokens, kv_type, arguments.recipe)))
        return
    if arguments.folder is None:
        parser.error("--folder is missing; give a folder with 4.3 GB of free space")
    folder = arguments.folder / "seven_billion"
    folder.mkdir(parents=True)
    try:
        path = folder / "random-7b-q4_k.gguf"
        write_model(path, arguments.layers)
        shape = f"Qwen2-7B's shape, {arguments.layers} layers"
        table = Table(title=f"{shape}, random Q4_K, {arguments.recipe}, {arguments.tokens:,} tokens")
        for column in (
            "keys and values",
            "file, GB",
            "weights, GB",
            "peak loaded, GB",
            "peak, GB",
            "≤ 6 GB",
            "ms/token",
        ):
            table.add_column(column, justify="right")
        for kv_type in arguments.kv_types.split(","):
            run = _in_process_of_its_own(path, kv_type, arguments)
            sizes = [f"{size / 1e9:.2f}" for size in (path.stat().st_size, run["weights"], run["loaded"], run["peak"])]
            verdict = "yes" if run["peak"] <= GOAL else "no"
            table.add_row(kv_type, *sizes, verdict, f"{1e3 * run['token']:.0f}")
        Console().print(table)
    finally:
        shutil.rmtree(folder)


def _in_process_of_its_own(path: Path, kv_type: str, arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.seven_billion", "--measure", str(path), kv_type]
    command += ["--tokens", str(arguments.tokens), "--recipe", arguments.recipe]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | RETURN_AT_ONCE
    ).stdout
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    main()
