"""The published layout of each architecture: metadata from a configuration, names of tensors, and their changes.

Written independently of `hetero_kv`, which reverses these layouts. Sources: `convert_hf_to_gguf.py` and
`gguf/tensor_mapping.py` of llama.cpp (https://github.com/ggml-org/llama.cpp).
"""

from tests.support.gguf_models.layouts import (
    chosen_blocks,
    deepseek,
    delta_net,
    dense,
    dots3_note,
    experts,
    gemma,
    gemma3n,
    gemma4,
    granite_hybrid,
    hyper_connections,
    kimi_linear,
    llama,
    other_experts,
    qwen,
    qwen4_exp,
    recurrent,
    state_space,
    ungated,
    windowed_experts,
)
from tests.support.gguf_models.layouts.layout import Layout, Place, Value

__all__ = ["LAYOUTS", "Layout", "Place", "Value"]

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    **llama.LAYOUTS,
    **qwen.LAYOUTS,
    **gemma.LAYOUTS,
    **dense.LAYOUTS,
    **ungated.LAYOUTS,
    **experts.LAYOUTS,
    **recurrent.LAYOUTS,
    **deepseek.LAYOUTS,
    **delta_net.LAYOUTS,
    **gemma3n.LAYOUTS,
    **gemma4.LAYOUTS,
    **granite_hybrid.LAYOUTS,
    **state_space.LAYOUTS,
    **kimi_linear.LAYOUTS,
    **windowed_experts.LAYOUTS,
    **other_experts.LAYOUTS,
    **hyper_connections.LAYOUTS,
    **chosen_blocks.LAYOUTS,
    **dots3_note.LAYOUTS,
    **qwen4_exp.LAYOUTS,
}
