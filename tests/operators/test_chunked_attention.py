"""Layers that attend within chunks of the text (Llama 4), among layers with full attention."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Llama4TextConfig

from hetero_kv import HeteroCache, eject, inject

CHUNK, PROMPT = 16, 70
IDS = torch.randint(5, 120, (1, 100), generator=torch.Generator().manual_seed(0))
COVERING = {"max_seq_len": 128, "kv_type": "FP32"}


@pytest.fixture(scope="module")
def llama4():
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=32,
        intermediate_size_mlp=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=CHUNK,
        # So that the layers without RoPE scale the attention of these positions.
        floor_scale=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, tensor in model.named_parameters():
        if "experts" in name:
            # Made without initial values.
            tensor.copy_(0.1 * torch.randn(tensor.shape))
    return model


@pytest.fixture(autouse=True)
def _no_gradients(one_thread):
    with torch.inference_mode():
        yield


def logits_of(model, cache, steps, rows=IDS):
    """The logits of all tokens, in forwards that end at `steps`."""
    return torch.cat(
        [model(rows[:, start:end], past_key_values=cache).logits for start, end in pairwise((0, *steps))], dim=1
    )


def relative_error(found, expected):
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("chunk_size", [7, CHUNK, 40, 512])
@pytest.mark.parametrize(
    "steps",
    [(PROMPT, 95, 96, 97, 100), (CHUNK, *range(CHUNK + 1, 35), 100), (1, 2, 31, 33, 64, 100)],
    ids=["a prompt and a turn", "tokens over a chunk's edge", "turns at edges"],
)
def test_logits_over_several_chunks_are_the_untouched_models(llama4, chunk_size, steps):
    expected = llama4(IDS).logits
    inject(llama4, "dense", command_line={**COVERING, "chunk_size": chunk_size})
    try:
        found = logits_of(llama4, HeteroCache(llama4), steps)
    finally:
        eject(llama4)
    assert relative_error(found, expected) < 1e-3


def test_the_untouched_model_sees_chunks(llama4):
    other = IDS.clone()
    other[:, : CHUNK - 1] = 7
    layer = llama4.model.layers[0].self_attn
    assert layer.config.layer_types[0] == "chunked_attention"
    seen = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    try:
        for ids in (IDS, other):
            llama4(ids, past_key_values=DynamicCache(config=llama4.config))
    finally:
        handle.remove()
    assert torch.equal(seen[0][:, CHUNK:], seen[1][:, CHUNK:])
    assert not torch.allclose(seen[0][:, CHUNK - 1], seen[1][:, CHUNK - 1])


def test_generated_tokens_of_padded_prompts_are_the_untouched_models(llama4):
    ids, mask = IDS[:, :40].repeat(2, 1), torch.ones(2, 40, dtype=torch.long)
    ids[1, :9], mask[1, :9] = 0, 0
    usual = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    expected = torch.cat(
        [llama4.generate(ids[row : row + 1, skip:], **usual)[:, 40 - skip :] for row, skip in ((0, 0), (1, 9))]
    )
    inject(llama4, "dense", command_line=COVERING)
    try:
        found = llama4.generate(ids, attention_mask=mask, **usual)[:, 40:]
    finally:
        eject(llama4)
    assert torch.equal(found, expected)
