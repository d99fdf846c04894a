"""A decoded token's layer with a mixture of experts is fused, and equals the layer, for every declared routing."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter import mixture_form, routed_experts
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.decoder_form import has_own_numbers
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.mixture_form import MixtureForm
from hetero_kv.adapter.quantized_experts import QuantizedExperts
from hetero_kv.adapter.routed_experts import RoutedExperts
from hetero_kv.cpu_ops.routing import SIGMOID, SOFTMAX
from hetero_kv.weights import quantized_weight
from tests.support.gguf_models.variants import tiny_model
from tests.support.slow_variants import with_slow
from tests.support.unpacked_layers import unpack

SETTINGS = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32", "weights": "q8_0"}
# A code of 8 bits that is rounded otherwise, among 64 of a row.
ROUNDING = 3e-2
#: Variant -> the kind of its routing (`routing.choose_experts`).
ROUTINGS = {
    "qwen3moe": (SOFTMAX, 1, 1, 1, 1),
    "llama: Mixtral": (SOFTMAX, 1, 1, 1, 1),
    "gpt-oss": (SOFTMAX, 1, 1, 1, 1),
    "qwen2moe": (SOFTMAX, 1, 1, 1, 0),
    "olmoe": (SOFTMAX, 1, 1, 1, 0),
    "granitemoe": (SOFTMAX, 1, 1, 1, 1),
    "glm4moe": (SIGMOID, 1, 1, 1, 1),
    "minimax-m2": (SIGMOID, 1, 1, 1, 1),
    "lfm2moe": (SIGMOID, 1, 1, 1, 1),
}
#: Kinds of routing of layers whose attention is not fused.
OTHER_ROUTINGS = {"deepseek2": (SIGMOID, 4, 2, 2, 1), "ernie4_5-moe": (SOFTMAX, 1, 1, 1, 1)}
SLOW = [*itertools.product(["olmoe", "minimax-m2", "llama: Mixtral"], [1, 3]), ("granitemoe", 3), ("lfm2moe", 3)]


def mixed_layers(model):
    """Layers with attention and experts."""
    layers = [each for each in model.modules() if isinstance(each, ChunkedDecoderLayer)]
    return [each for each in layers if not each.is_recurrent and blocks_of(each)]


def blocks_of(module):
    """Blocks with a router and experts."""
    return [each for each in module.modules() if isinstance(getattr(each, "experts", None), QuantizedExperts)]


@cache
def injected(name):
    model = tiny_model(name)
    inject(model, "dense", command_line=SETTINGS)
    for module in model.modules():
        # Modules round the inputs of a packed gate to 8 bits, the fused layer does not.
        if hasattr(module, "shared_expert_gate"):
            unpack(module, "shared_expert_gate")
    return model


def decoded(model, rows=1, tokens=4):
    """Logits of some tokens behind a prompt."""
    cache = HeteroCache(model, 256)
    model((torch.arange(2, 32)[None] % 90).repeat(rows, 1), past_key_values=cache)
    steps = [torch.full((rows, 1), 3 + step) + 7 * torch.arange(rows)[:, None] for step in range(tokens)]
    return torch.cat([model(step, past_key_values=cache).logits for step in steps], dim=1)


def relative(mine, expected):
    return float((mine - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "rows"), with_slow(itertools.product(ROUTINGS, [1, 3]), slow=SLOW))
def test_a_token_passes_a_fused_mixture_as_its_modules(name, rows, monkeypatch):
    model = injected(name)
    native = decoded(model, rows)
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in mixed_layers(model))
    monkeypatch.setattr(ChunkedDecoderLayer, "_fused_decode", lambda self: None)
    monkeypatch.setattr(RoutedExperts, "products", lambda self: None)
    assert relative(native, decoded(model, rows)) < ROUNDING


@pytest.mark.parametrize("name", [*ROUTINGS, *OTHER_ROUTINGS])
def test_the_kind_of_a_routing_is_found_out(name):
    found = [MixtureForm.of(block) for block in blocks_of(injected(name))]
    expected = {**ROUTINGS, **OTHER_ROUTINGS}[name]
    assert found
    assert [tuple(form.choice) for form in found] == [expected] * len(found)


# DeepSeek's shape has a kernel of its own: test_exactness.py.
@pytest.mark.parametrize("name", with_slow(list(OTHER_ROUTINGS), slow=["deepseek2"]))
def test_experts_are_computed_by_one_kernel_where_the_layer_is_not_fused(name, monkeypatch):
    model = injected(name)
    native = decoded(model)
    assert all(each.routed.products() is not None for each in model.modules() if isinstance(each, QuantizedExperts))
    monkeypatch.setattr(RoutedExperts, "products", lambda self: None)
    assert relative(native, decoded(model)) < ROUNDING


def test_an_unknown_routing_is_said_by_name(monkeypatch, caplog):
    monkeypatch.setattr(mixture_form, "_choices", lambda block: [(SIGMOID, 1, 1, 1, 0)])
    caplog.set_level("INFO")
    model = tiny_model("qwen3moe")
    inject(model, "dense", command_line=SETTINGS)
    decoded(model, tokens=1)
    assert [layer._native for layer in mixed_layers(model)] == [None] * 3
    assert "model.layers.0.mlp.experts: the routing is of no known kind" in caplog.text


@pytest.mark.parametrize("wrong", ["scale", "choice", "k", "router"])
def test_a_wrong_form_is_noticed(wrong, monkeypatch, caplog):
    made = MixtureForm.of

    def seeded(block, *beside):
        form = made(block, *beside)
        changed = {
            "scale": form.scale * 1.5, "choice": form.choice * 0, "k": form.k - 1, "router": form.router[::-1].copy(),
        }  # fmt: skip
        return dataclasses.replace(form, **{wrong: changed[wrong]})

    monkeypatch.setattr(MixtureForm, "of", staticmethod(seeded))
    model = tiny_model("qwen3moe")
    inject(model, "dense", command_line=SETTINGS)
    decoded(model, tokens=1)
    assert [layer._native for layer in mixed_layers(model)] == [None] * 3
    assert "it is not used, and" in caplog.text


def test_a_router_that_changes_is_tried_again():
    model = tiny_model("gpt-oss")
    inject(model, "dense", command_line=SETTINGS)
    before = decoded(model)
    for block in blocks_of(model):
        block.router.bias.data += torch.tensor([9.0, 0.0, -9.0, 0.0])
    after = decoded(model)
    assert relative(after, before) > 3 * ROUNDING
    for layer in mixed_layers(model):
        layer._native = None
    assert relative(after, decoded(model)) < ROUNDING


def many_rows():
    """Experts, 240 rows, their experts and shares: expert 0 has 200 rows, the others have few of the rest."""
    experts = next(each for each in injected("qwen3moe").modules() if isinstance(each, QuantizedExperts))
    generator = torch.Generator().manual_seed(0)
    x, shares = torch.randn(240, 64, generator=generator), torch.rand(240, 2, generator=generator)
    chosen = torch.stack([torch.where(torch.arange(240) < 200, 0, 3), 1 + torch.arange(240) % 2], dim=1)
    chosen[torch.arange(240) % 5 > 0, 1] = 4
    return experts, x, chosen, shares


def test_rows_of_a_prompt_take_codes_or_numbers_by_how_many_an_expert_has(monkeypatch):
    experts, *rows = many_rows()
    monkeypatch.setattr(quantized_weight, "dot_instruction", lambda: "generic")
    mine = experts(*rows)
    monkeypatch.setattr(routed_experts, "_PAIRS_AT_ONCE", 30)
    assert torch.equal(mine, experts(*rows))
    monkeypatch.setattr(RoutedExperts, "products", lambda self: None)
    assert relative(mine, experts(*rows)) < ROUNDING


def test_where_all_rows_of_a_prompt_take_codes_they_equal_each_row_alone(monkeypatch):
    experts, *rows = many_rows()
    monkeypatch.setattr(RoutedExperts, "most_rows_of_codes", lambda self, dtype: 240)
    alone = torch.cat([experts(*(each[row : row + 1] for each in rows)) for row in range(240)])
    assert torch.equal(experts(*rows), alone)
    monkeypatch.setattr(routed_experts, "_PAIRS_AT_ONCE", 30)
    assert torch.equal(experts(*rows), alone)
    monkeypatch.setattr(RoutedExperts, "products", lambda self: None)
    assert 0 < relative(alone, experts(*rows)) < ROUNDING


@pytest.mark.parametrize(
    ("instruction", "has_tiles", "dtype", "most"),
    [
        ("vnni512", False, torch.float32, sys.maxsize), ("vnni512", False, torch.bfloat16, sys.maxsize),
        ("vnni256", False, torch.float32, sys.maxsize), ("vnni512", True, torch.float32, sys.maxsize),
        ("vnni512", True, torch.bfloat16, 48), ("avx2", False, torch.float32, sys.maxsize),
        ("generic", False, torch.float32, 96),
    ],
)  # fmt: skip
def test_any_rows_take_codes_with_dot_products_of_bytes_and_no_tiles(instruction, has_tiles, dtype, most, monkeypatch):
    monkeypatch.setattr(quantized_weight, "isa", lambda: "avx512")
    monkeypatch.setattr(quantized_weight, "dot_instruction", lambda: instruction)
    monkeypatch.setattr(quantized_weight, "multiplies_by_tiles", lambda: has_tiles)
    assert quantized_weight.most_rows_of_codes("Q4_K", dtype) == most
    assert quantized_weight.most_rows_of_codes("F16", dtype) == 32


@pytest.mark.parametrize("name", ["Q8_0", "IQ4_XS", "IQ2_XXS"])
def test_long_prompts_take_numbers_where_avx2_widens_sums_often(name, monkeypatch):
    monkeypatch.setattr(quantized_weight, "isa", lambda: "avx2")
    monkeypatch.setattr(quantized_weight, "dot_instruction", lambda: "avx2")
    monkeypatch.setattr(quantized_weight, "multiplies_by_tiles", lambda: False)
    assert quantized_weight.most_rows_of_codes(name, torch.float32) == 96
    assert quantized_weight.most_rows_of_codes(name, torch.bfloat16) == sys.maxsize


@pytest.mark.parametrize(
    ("attributes", "found"),
    [({"limit": 7}, True), ({"scale": 0.5}, True), ({"hidden_size": 8, "is_gated": True}, False)],
)
def test_a_limit_that_is_a_whole_number_counts_as_a_number_of_the_module(attributes, found):
    assert has_own_numbers(SimpleNamespace(**attributes)) is found
