"""Experts in DRAM, computed by the CPU beside a GPU: the same answers, one wait a layer, and graphs between them."""

from __future__ import annotations

import gc
from itertools import takewhile

import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter import experts_in_dram
from hetero_kv.adapter.experts_in_dram import ROWS_PER_EXPERT, ExpertsInDram
from hetero_kv.adapter.quantized_experts import QuantizedExperts
from hetero_kv.gpu_ops.prefetch import Prefetch
from tests.support.devices import simulated_cuda
from tests.support.simulated_cuda import Copy, Wait
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
SMALL = {"block_size": 8, "max_seq_len": 256, "kv_type": "FP32", "chunk_size": 64}
#: Four experts, two of a token.
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
#: More rows than the CPU computes, with hidden states in DRAM and a short last chunk; and fewer rows.
LONG, SHORT = 200, 9


@pytest.fixture
def gpu():
    with simulated_cuda() as simulation:
        yield simulation
        gc.collect()


def random_tokens(count, rows=1, seed=0):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


def injected(model_type, where, dtype=torch.float32, recipe="dense", **settings):
    """A model on the GPU under rules, and a cache."""
    model = tiny_model(model_type).to(dtype).to("cuda")
    inject(model, recipe, command_line={**SMALL, "experts_device": where, **settings})
    return model, HeteroCache(model)


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@torch.no_grad()
def told(model, cache, *parts):
    """Logits of prompts and tokens, each behind the ones before."""
    return torch.cat([model(part.to("cuda"), past_key_values=cache).logits.cpu() for part in parts], dim=1)


def conversation(model, cache):
    """Logits of two turns, a long and a short prompt, and of their tokens; of two rows; and of one of them."""
    found = [told(model, cache, random_tokens(LONG), *random_tokens(5).split(1, dim=1))]
    found += [told(model, cache, random_tokens(SHORT, seed=1), *random_tokens(3, seed=2).split(1, dim=1))]
    cache.select([0, 0])
    found += [told(model, cache, *random_tokens(4, rows=2, seed=3).split(1, dim=1))]
    cache.select([1])
    found += [told(model, cache, *random_tokens(2, seed=4).split(1, dim=1))]
    return torch.cat([each.flatten(0, 1) for each in found])


def relative(mine, expected):
    return float((mine.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("model_type", with_few(MIXTURES, ("gpt_oss", "deepseek_v3")))
def test_unpacked_experts_in_dram_answer_as_on_the_gpu(gpu, model_type):
    expected = conversation(*injected(model_type, "gpu", cuda_graphs="off"))
    for graphs in ("off", "on"):
        model, cache = injected(model_type, "dram", cuda_graphs=graphs)
        experts = experts_of(model)
        assert {each.device.type for module in experts for each in module.parameters()} == {"cpu"}
        torch.testing.assert_close(conversation(model, cache), expected, rtol=1e-4, atol=1e-4)
        assert (model.hetero_kv_injection.captures.state == "on") == (graphs == "on")


def test_experts_in_bfloat16_answer_to_their_precision(gpu):
    expected = conversation(*injected("qwen3_moe", "gpu", torch.bfloat16))
    assert relative(conversation(*injected("qwen3_moe", "dram", torch.bfloat16)), expected) < 0.02


@pytest.mark.parametrize("model_type", with_few(MIXTURES, ("gpt_oss", "mixtral")))
def test_packed_experts_in_dram_answer_as_on_the_gpu(gpu, model_type):
    expected = conversation(*injected(model_type, "gpu", weights="q8_0"))
    model, cache = injected(model_type, "dram", weights="q8_0")
    found = conversation(model, cache)
    assert all(weights.data.device.type == "cpu" for each in experts_of(model) for weights in each.packed_weights())
    # The CPU rounds activations to 8 bits, so that a token may choose another expert.
    assert 0 < relative(found, expected) < 0.1


def test_rows_of_several_lengths_answer_as_on_the_gpu(gpu):
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[1, :7], mask[2, :12] = 0, 0
    ids, found = random_tokens(20, rows=3), {}
    for where in ("gpu", "dram"):
        model, cache = injected("deepseek_v3", where)
        with torch.no_grad():
            parts = [model(ids.to("cuda"), attention_mask=mask.to("cuda"), past_key_values=cache).logits[:, -1:]]
            for token in random_tokens(4, rows=3, seed=1).to("cuda").split(1, dim=1):
                mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], dim=1)
                parts.append(model(token, attention_mask=mask.to("cuda"), past_key_values=cache).logits)
        mask, found[where] = mask[:, :20], torch.cat(parts, dim=1).cpu()
    torch.testing.assert_close(found["dram"], found["gpu"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, SHORT])
def test_packed_experts_give_what_they_give_a_model_on_the_cpu(gpu, rows):
    on_cpu = tiny_model("mixtral")
    inject(on_cpu, "dense", command_line={**SMALL, "weights": "q8_0"})
    model, _ = injected("mixtral", "dram", weights="q8_0")
    generator = torch.Generator().manual_seed(1)
    x, shares = torch.randn(rows, 64, generator=generator), torch.rand(rows, 2, generator=generator)
    # The last of four is an id of no expert.
    chosen = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(rows)])
    for mine, theirs in zip(experts_of(model), experts_of(on_cpu), strict=True):
        found = mine(x.to("cuda"), chosen.to("cuda"), shares.to("cuda")).cpu()
        assert torch.equal(found, theirs(x, chosen, shares))


@pytest.mark.parametrize(("model_type", "weights"), [("gpt_oss", "q8_0"), ("gpt_oss", "auto"), ("mixtral", "q4_0")])
def test_a_long_prompt_reads_the_experts_that_it_needs_piece_by_piece(gpu, monkeypatch, model_type, weights):
    monkeypatch.setattr(experts_in_dram, "_PIECE_BYTES", 1)
    streamed, pieces = [], Prefetch.pieces
    monkeypatch.setattr(Prefetch, "pieces", lambda self, queue: streamed.append(len(queue)) or pieces(self, queue))
    model, _ = injected(model_type, "dram", weights=weights)
    plain, _ = injected(model_type, "gpu", weights=weights)
    generator = torch.Generator().manual_seed(1)
    x, shares = torch.randn(LONG, 64, generator=generator), torch.rand(LONG, 2, generator=generator)
    # No row has the third expert.
    chosen = torch.tensor([[0, 1], [1, 3]]).repeat(LONG // 2 + 1, 1)[:LONG]
    arguments = [each.to("cuda") for each in (x, chosen, shares)]
    gpu.record.clear()
    found = experts_of(model)[0](*arguments)
    assert streamed == [3]
    assert not gpu.record.pageable
    experts = experts_of(model)[0]
    tensors = (*experts.parameters(), *experts.buffers())
    assert 4 * sum(each.nbytes for each in gpu.record.copies if each.to_device) == 3 * sum(t.nbytes for t in tensors)
    torch.testing.assert_close(found, plain.model.layers[0].mlp.experts(*arguments), rtol=1e-4, atol=1e-4)
    assert {each.device.type for each in tensors} == {"cpu"}


def test_the_cpu_computes_up_to_so_many_rows_and_the_gpu_more(gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(ExpertsInDram, "_streamed", lambda self, x, *_: seen.append(("gpu", len(x))) or x)
    monkeypatch.setattr(ExpertsInDram, "on_cpu", lambda self, out, dtype, rows, _: seen.append(("cpu", len(rows))))
    experts = experts_of(injected("mixtral", "dram")[0])[0]
    # Two experts of four for a row.
    most = ROWS_PER_EXPERT * 4 // 2
    for rows in (1, most, most + 1):
        x, chosen = torch.zeros(rows, 64, device="cuda"), torch.zeros(rows, 2, dtype=torch.int64, device="cuda")
        experts(x, chosen, torch.ones(rows, 2, device="cuda"))
    assert seen == [("cpu", 1), ("cpu", most), ("gpu", most + 1)]


def counts_of_a_token(gpu, where, graphs="off", model_type="qwen3_moe"):
    """(launches, waits, copies to the device, copies from it) of a decoded token."""
    model, cache = injected(model_type, where, cuda_graphs=graphs)
    told(model, cache, random_tokens(40), *random_tokens(4).split(1, dim=1))
    token = random_tokens(1).to("cuda")
    gc.collect()
    gpu.record.clear()
    with torch.no_grad():
        model(token, past_key_values=cache)
    record = gpu.record
    assert record.pageable == []
    up = [copied for copied in record.copies if copied.to_device]
    return len(record.launches), len(record.waits), len(up), len(record.copies) - len(up)


def test_a_token_waits_once_a_layer_for_its_experts_and_crosses_the_bus_once_each_way(gpu):
    layers = 3
    plain, found = (counts_of_a_token(gpu, where) for where in ("gpu", "dram"))
    assert [mine - theirs for mine, theirs in zip(found[1:], plain[1:], strict=True)] == [layers] * 3
    # Hidden states, experts and shares are gathered for the copy, and the result gets its type.
    assert experts_in_dram_launches(gpu) == 4 * layers


def experts_in_dram_launches(gpu):
    return sum("experts_in_dram" in each.line or "graph_recording" in each.line for each in gpu.record.launches)


def test_a_captured_token_has_a_segment_more_a_layer(gpu):
    layers = 3
    plain, found = (counts_of_a_token(gpu, where, "on") for where in ("gpu", "dram"))
    assert [mine - theirs for mine, theirs in zip(found[1:], plain[1:], strict=True)] == [layers] * 3
    # The segment behind the experts, and the copy of the result into it.
    assert found[0] - plain[0] == 2 * layers


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_shared_expert_is_launched_before_the_host_waits(gpu, graphs):
    model, cache = injected("deepseek_v3", "dram", cuda_graphs=graphs)
    told(model, cache, random_tokens(40), *random_tokens(4).split(1, dim=1))
    assert all(each._in_dram.shared.comes_after for each in experts_of(model))
    gpu.record.clear()
    told(model, cache, random_tokens(1))
    everything = gpu.record.everything
    sent = [
        place
        for place, each in enumerate(everything)
        if isinstance(each, Copy) and not each.to_device and each.nbytes == 4 * (64 + 2 * 2)
    ]
    assert len(sent) == len(experts_of(model))
    for place in sent:
        meanwhile = list(takewhile(lambda each: not isinstance(each, Wait), everything[place + 1 :]))
        # Three products, or the segment with them.
        assert len(meanwhile) >= 3 if graphs == "off" else [each.name for each in meanwhile] == ["graph"]


def test_a_shared_expert_that_is_called_first_is_computed_once(gpu):
    model, cache = injected("qwen2_moe", "dram", cuda_graphs="off")
    calls = []
    for module in model.modules():
        if type(module).__name__ == "Qwen2MoeSparseMoeBlock":
            module.shared_expert.down_proj.register_forward_hook(lambda *_: calls.append(1))
    told(model, cache, random_tokens(LONG), random_tokens(1))
    assert not any(each._in_dram.shared.comes_after for each in experts_of(model))
    calls.clear()
    told(model, cache, random_tokens(1))
    assert len(calls) == len(experts_of(model))


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_an_error_of_the_cpu_undoes_the_token(gpu, monkeypatch, graphs):
    model, cache = injected("mixtral", "dram", cuda_graphs=graphs)
    expected = conversation(*injected("mixtral", "dram", cuda_graphs=graphs))
    told(model, cache, random_tokens(LONG), *random_tokens(4).split(1, dim=1))
    calls, computed = [], ExpertsInDram.on_cpu

    def failing(self, *arguments):
        calls.append(self)
        if len(calls) == 2:
            raise RuntimeError("the second layer's experts")
        computed(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertsInDram, "on_cpu", failing)
        with pytest.raises(RuntimeError, match="the second layer's experts"):
            told(model, cache, random_tokens(1, seed=9))
    assert cache.get_seq_length() == LONG + 4
    cache.crop(-4)
    found = told(model, cache, *random_tokens(5).split(1, dim=1))
    torch.testing.assert_close(found[0], expected[LONG : LONG + 5], rtol=1e-5, atol=1e-5)


def test_a_model_gets_its_experts_back(gpu):
    model, cache = injected("deepseek_v3", "dram")
    told(model, cache, random_tokens(5))
    shared = [each._in_dram.shared.module for each in experts_of(model)]
    assert all("forward" in module.__dict__ for module in shared)
    eject(model)
    assert not any("forward" in module.__dict__ for module in shared)
    assert {each.device.type for each in model.parameters()} == {"cuda"}
    expected = tiny_model("deepseek_v3").state_dict()
    assert all(torch.equal(each.cpu(), expected[name]) for name, each in model.state_dict().items())


def test_experts_stay_in_dram_when_the_model_moves(gpu):
    model, _ = injected("mixtral", "dram")
    model.to("cuda")
    assert {each.device.type for module in experts_of(model) for each in module.parameters()} == {"cpu"}
    model.to(torch.bfloat16)
    assert {each.dtype for module in experts_of(model) for each in module.parameters()} == {torch.bfloat16}


def test_experts_in_dram_beside_attention_on_the_gpu(gpu):
    settings = {"recipe": "quest", "top_k_blocks": 2, "local_windows_len": 16, "dense_layer_num": 1}
    expected = conversation(*injected("qwen3_moe", "gpu", attend_on="gpu", **settings))
    model, cache = injected("qwen3_moe", "dram", attend_on="gpu", cuda_graphs="on", **settings)
    torch.testing.assert_close(conversation(model, cache), expected, rtol=1e-4, atol=1e-4)
