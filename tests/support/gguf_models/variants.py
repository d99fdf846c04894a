"""Tiny random models to be written as files, in which every loss of a file would show."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
)

from tests.support.gguf_models.dense_variants import DENSE_VARIANTS
from tests.support.gguf_models.expert_variants import EXPERT_VARIANTS
from tests.support.gguf_models.layouts import LAYOUTS
from tests.support.gguf_models.recurrent_variants import RECURRENT_VARIANTS
from tests.support.gguf_models.settings import BASE
from tests.support.gguf_models.vocabularies import GEMMA, LLAMA, of_bytes, of_pieces

#: Name -> (transformers' model type, settings). The part before a colon is the file's architecture.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {**DENSE_VARIANTS, **EXPERT_VARIANTS, **RECURRENT_VARIANTS}
#: Settings that these have by other names.
_NOT_THEIRS = {
    "gpt_neox": ("num_key_value_heads",),
    "falcon": ("num_key_value_heads", "intermediate_size"),
    "bloom": tuple(BASE.keys() - {"hidden_size"}),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "mpt", "dbrx"), tuple(BASE)),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba"),
        ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    ),
    "nemotron_h": ("num_hidden_layers",),
    "qwen3_5_moe_text": ("intermediate_size",),
    "qwen4_exp_text": ("intermediate_size",),
    "hrm_text": ("num_key_value_heads",),
}


def vocabulary_of(model_type: str) -> dict[str, Any]:
    """The metadata of the vocabulary that files of this model have."""
    layout = LAYOUTS[model_type]
    if not layout.pieces:
        return of_bytes(layout.pre)
    return of_pieces(GEMMA if model_type.startswith("gemma") else LLAMA)


def tiny_model(name: str, *, eighths: bool = False, **changed: Any) -> PreTrainedModel:
    """The model of a variant, float32, always the same one.

    Args:
        eighths: its matrices are such that Q8_0 has them without rounding.
        changed: settings instead of the variant's.
    """
    model_type, settings = VARIANTS[name]
    vocabulary = vocabulary_of(model_type)
    base = {key: value for key, value in BASE.items() if key not in _NOT_THEIRS.get(model_type, ())}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(vocabulary["tokenizer.ggml.tokens"]),
        bos_token_id=vocabulary["tokenizer.ggml.bos_token_id"],
        eos_token_id=vocabulary["tokenizer.ggml.eos_token_id"],
        pad_token_id=None,
        **{**base, **settings, **changed},
    )
    if model_type == "mistral4":
        # transformers has the class, and leaves it out of its table of causal language models.
        AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    _randomise(model, torch.Generator().manual_seed(sum(map(ord, name))))
    if eighths:
        _to_eighths(model)
    return model


def _randomise(model: PreTrainedModel, random: torch.Generator) -> None:
    """Nothing is as a new model has it: norms are not one, biases and buffers not zero."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, tensor in model.named_parameters():
        numbers = torch.randn(tensor.shape, generator=random)
        inputs = tensor.shape[0] if "c_attn" in name else tensor.shape[-1]
        if tensor is embedding:
            numbers *= 0.5 if head is embedding else 1.0
        elif tensor is head:
            numbers *= 4 / inputs**0.5
        elif "A_log" in name:
            numbers = torch.log(torch.rand(tensor.shape, generator=random) * 7 + 1)
        elif name.endswith(("mixer.D", "mamba.D")):
            numbers = 1 + 0.5 * numbers
        elif ".post_" in name and model.config.num_hidden_layers > 16:
            # What many layers add: more of it would magnify rounding beyond all bounds.
            numbers = -0.7 + 0.1 * numbers
        elif ("norm" in name or "ln_" in name) and not name.endswith("bias"):
            numbers = 1 + 0.3 * numbers
        elif tensor.dim() == 1 and "sinks" not in name:
            numbers *= 0.3
        elif tensor.dim() > 1:
            numbers *= 0.6 if "conv" in name else 1.3 / inputs**0.5
        if name.endswith("q_norm.weight") and model.config.model_type == "gemma4_text":
            # Instead of a scale of attention, which this model does not have.
            numbers *= tensor.shape[0] ** -0.5
        tensor.copy_(numbers)
    for name, buffer in model.named_buffers():
        if name in model.state_dict() and buffer.is_floating_point():
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=random))
        elif name.endswith("tid2eid"):
            buffer.copy_(torch.randint(model.config.n_routed_experts, buffer.shape, generator=random))


def _to_eighths(model: PreTrainedModel) -> None:
    """Whole numbers up to 127 times a power of two; in every 32 of a row and of a column one is 127."""
    for tensor in model.parameters():
        if tensor.dim() < 2:
            continue
        step = 2.0 ** torch.round(torch.log2(tensor.std() * 2 / 127))
        whole = (tensor / step).round().clamp(-127, 127)
        rows, columns = torch.arange(tensor.shape[-2]), torch.arange(tensor.shape[-1])
        whole[..., (rows[:, None] + columns) % 32 == 0] = 127
        tensor.copy_(whole * step)
