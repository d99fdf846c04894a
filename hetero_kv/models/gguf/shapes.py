"""Compares a tensor's shape with its parameter's, and names the metadata keys that determine the shape."""

from __future__ import annotations

import re

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.file import GGUFFile, TensorInfo

_HEADS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "rope.dimension_count",
    "kda.head_dim",
)
_FEED_FORWARD = ("feed_forward_length", "expert_feed_forward_length")
_LATENT = ("attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla")
_STATE = ("conv_kernel", "inner_size", "state_size", "group_count", "time_step_rank")
#: Regular expression for tensor names -> keys, without the architecture's name, that may determine their shape.
_SHAPED_BY = {
    r".*_exps\..*|.*ffn_gate_inp.*|.*exp_probs_b.*": ("expert_count", *_FEED_FORWARD),
    r".*_shexp\..*": ("expert_shared_feed_forward_length", "expert_shared_count", *_FEED_FORWARD),
    r".*\.ffn_(gate|up|down)\..*": _FEED_FORWARD,
    r".*\.attn_(q|k|v|qkv|gate|output|q_norm|k_norm|sinks)\..*": _HEADS,
    r".*\.attn_(q|q_a|q_b|kv_a|kv_b|k_b|v_b|output)(_mqa|_norm)?\..*": (*_LATENT, "rope.dimension_count"),
    r".*\.(ssm_.*|attn_qkv\..*|attn_gate\..*)": (*(f"ssm.{name}" for name in _STATE), "kda.head_dim"),
    r".*\.indexer\..*": ("attention.indexer.head_count", "attention.indexer.key_length"),
    r".*\.shortconv\..*": ("shortconv.l_cache",),
    r"position_embd\..*": ("context_length",),
}


def require_shape(file: GGUFFile, info: TensorInfo, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    """Raise ModelError if a tensor's shape `found` is not its parameter's, `expected`."""
    if tuple(found) == expected:
        return
    raise ModelError(
        f"tensor {info.name!r} of {str(file.parts[info.part].path)!r} is {list(found)} and the model's parameter "
        f"{list(expected)}, by {sizes_in(file, info)}; download the file again, or convert it again"
    )


def sizes_in(file: GGUFFile, info: TensorInfo) -> str:
    """The keys of a file that may determine a tensor's shape, with their values."""
    suffixes = ["embedding_length"]
    for pattern, more in _SHAPED_BY.items():
        if re.fullmatch(pattern, info.name):
            suffixes += more
    keys = dict.fromkeys(f"{file.architecture}.{suffix}" for suffix in suffixes)
    return ", ".join(f"{key} {file.get(key)}" for key in keys if key in file.metadata) or "its configuration"
