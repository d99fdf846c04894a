"""dots3-note, whose layers with a window have another latent attention than the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.deepseek import INDEXER, INDEXER_KEYS, LAYER, dense_layers
from tests.support.gguf_models.layouts.keys import RMS, ROUTED, SIZES, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout, Value, always
from tests.support.gguf_models.layouts.names import MODEL
from tests.support.gguf_models.layouts.rotation import rotation_of


def _of(kind: str, value: Callable[[Any], Any]) -> Value:
    """The value of the configuration that layers of a kind have."""
    return lambda config: value(config.per_layer_config[f"{kind}_attention"])


def _slides(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def latent_keys(kind: str, end: str) -> dict[str, Value]:
    """The sizes of latent attention in layers of a kind; `end` ends their keys."""
    return {
        f"attention.kv_lora_rank{end}": _of(kind, lambda config: config.kv_lora_rank),
        f"attention.key_length{end}": _of(kind, lambda config: config.kv_lora_rank + config.qk_rope_head_dim),
        f"attention.value_length{end}": _of(kind, lambda config: config.kv_lora_rank),
        f"attention.key_length_mla{end}": _of(kind, lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim),
        f"attention.value_length_mla{end}": _of(kind, lambda config: config.v_head_dim),
    }


def scaled(tensor: np.ndarray, config: Any) -> np.ndarray:
    """A norm with the factor by which the model multiplies what it normalizes."""
    return tensor * np.float32((config.hidden_size / len(tensor)) ** 0.5)


#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "dots3_note_text": Layout(
        "dots3note",
        {
            **SIZES,
            **RMS,
            **VOCABULARY,
            **ROUTED,
            **INDEXER_KEYS,
            **latent_keys("indexed", ""),
            **latent_keys("sliding", "_swa"),
            "attention.head_count": lambda config: [each.num_attention_heads for each in config.per_layer_config],
            "attention.head_count_kv": always(1),
            "attention.q_lora_rank": "q_lora_rank",
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": _slides,
            "attention.indexer.types": lambda config: [not each for each in _slides(config)],
            "rope.dimension_count": "qk_rope_head_dim",
            "rope.freq_base": lambda config: rotation_of(config, "indexed_attention")["rope_theta"],
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
            "expert_gating_func": always(2),
            "leading_dense_block_count": dense_layers,
        },
        {
            **LAYER,
            **INDEXER,
            "self_attn.q_a_layernorm": ("attn_q_a_norm", scaled),
            "self_attn.kv_a_layernorm": ("attn_kv_a_norm", scaled),
            "self_attn.k_rope_only_layernorm": "attn_k_norm",
            "self_attn.g_proj": "attn_gate",
            "self_attn.kv_b_proj.weight": ("", changes.latent_keys_and_values),
        },
        MODEL,
    ),
}
