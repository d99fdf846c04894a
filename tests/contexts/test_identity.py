"""A saved context belongs to all bytes of the weights and to the adapters that are active."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hetero_kv import HeteroCache, inject
from hetero_kv.contexts.prefix_cache import PrefixCache
from hetero_kv.contexts.store import ContextStore
from hetero_kv.contexts.tensor_digests import TensorDigests
from hetero_kv.engine.errors import ContextError
from tests.support.tiny_models import tiny_model

SETTINGS = {"block_size": 4, "max_seq_len": 128, "kv_type": "FP32"}
PROMPT = (torch.arange(40) % 90 + 2)[None]


def llama(around=lambda model: None):
    model = tiny_model("llama", num_hidden_layers=2)
    around(model)
    inject(model, "quest", command_line=SETTINGS)
    return model


@torch.no_grad()
def prefilled(model):
    cache = HeteroCache(model)
    model(PROMPT, past_key_values=cache)
    return cache


class Adapter(nn.Module):
    """A linear layer with adapters, of the form of PEFT's: several are there, some are active, merged or off."""

    adapter_layer_names = ("lora",)

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        generator = torch.Generator().manual_seed(0)
        shape = base_layer.weight.shape
        self.lora = nn.ParameterDict({name: torch.randn(shape, generator=generator) / 8 for name in "AB"})
        self.scaling = {"A": 1.0, "B": 1.0}
        self.active_adapters, self.merged_adapters, self.disable_adapters = ["A"], [], False

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        out = self.base_layer(x)
        for name in self.active_adapters:
            if not self.disable_adapters and name not in self.merged_adapters:
                out = out + self.scaling[name] * nn.functional.linear(x, self.lora[name])
        return out

    def merge(self, name):
        self.base_layer.weight.data += self.scaling[name] * self.lora[name]
        self.merged_adapters.append(name)


def adapted(model):
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)


def adapters(model):
    return [module for module in model.modules() if isinstance(module, Adapter)]


#: What changes what the model computes.
CHANGES = {
    "other adapter": lambda adapter: setattr(adapter, "active_adapters", ["B"]),
    "both adapters": lambda adapter: setattr(adapter, "active_adapters", ["A", "B"]),
    "off": lambda adapter: setattr(adapter, "disable_adapters", True),
    "scale": lambda adapter: adapter.scaling.update(A=0.5),
    "merged": lambda adapter: adapter.merge("A"),
    "adapter's weights": lambda adapter: adapter.lora["A"].data.mul_(1.01),
    "weights in place": lambda adapter: adapter.base_layer.weight.mul_(1.01),
    "one number": lambda adapter: adapter.base_layer.weight.data[3, 5].add_(1e-3),
    "other data": lambda adapter: setattr(adapter.base_layer.weight, "data", adapter.base_layer.weight.data + 1),
}


DRAWN_CHANGES = given(change=st.sampled_from(list(CHANGES)), number=st.integers(0, 1))


@settings(max_examples=9, deadline=None)
@DRAWN_CHANGES
def test_a_context_is_refused_when_anything_that_is_active_has_changed(change, number, tmp_path_factory):
    is_refused_after(change, number, tmp_path_factory)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@DRAWN_CHANGES
def test_contexts_are_refused_after_more_changes(change, number, tmp_path_factory):
    is_refused_after(change, number, tmp_path_factory)


def is_refused_after(change, number, tmp_path_factory):
    path = tmp_path_factory.mktemp("contexts") / "context.safetensors"
    model = llama(adapted)
    cache = prefilled(model)
    cache.save(path)
    HeteroCache.load(path, model)
    with torch.no_grad():
        CHANGES[change](adapters(model)[number])
    with pytest.raises(ContextError, match="saved with other"):
        HeteroCache.load(path, model)
    # What was computed before is not saved as if it were of what is active now; of single numbers none is looked at.
    if change != "one number":
        with pytest.raises(ContextError, match="computed with other weights, adapters or hooks"):
            cache.save(path)
    prefilled(model).save(path)
    HeteroCache.load(path, model)


def test_adapters_that_are_inactive_do_not_count(tmp_path):
    path = tmp_path / "context.safetensors"
    prefilled(llama()).save(path)
    model = llama(adapted)
    with pytest.raises(ContextError, match=r"Adapter .*adapters: \[A\]"):
        HeteroCache.load(path, model)
    for adapter in adapters(model):
        adapter.disable_adapters = True
    HeteroCache.load(path, model)
    for adapter in adapters(model):
        adapter.disable_adapters = False
    prefilled(model).save(path)
    for adapter in adapters(model):
        del adapter.lora["B"], adapter.scaling["B"]
    HeteroCache.load(path, model)


def test_a_checkpoint_with_a_few_other_embeddings_is_another(tmp_path):
    path = tmp_path / "context.safetensors"
    prefilled(llama()).save(path)

    def trained(model):
        model.model.embed_tokens.weight.data[61:63, ::2] *= 1.0001

    with pytest.raises(ContextError, match="saved with other weights"):
        HeteroCache.load(path, llama(trained))
    HeteroCache.load(path, llama())


def test_contexts_of_models_with_hooks_are_unidentifiable(tmp_path):
    path = tmp_path / "context.safetensors"
    model = llama()
    prefilled(model).save(path)

    def steered(module, args, output):
        return output * 1.5

    handle = model.model.layers[0].mlp.register_forward_hook(steered)
    for refused in (lambda: HeteroCache.load(path, model), lambda: prefilled(model).save(path)):
        with pytest.raises(ContextError, match=r"model\.layers\.0\.mlp \(LlamaMLP\) has a forward hook.*steered"):
            refused()
    handle.remove()
    HeteroCache.load(path, model)


def test_other_activations_and_scales_of_attention_are_another_model(tmp_path):
    path = tmp_path / "context.safetensors"
    prefilled(llama()).save(path)
    for change in (
        lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.ReLU()),
        lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
        lambda model: model.model.rotary_emb.inv_freq.mul_(2),
        lambda model: nn.utils.weight_norm(model.model.layers[0].mlp.up_proj),
    ):
        with pytest.raises(ContextError, match="saved with other"):
            HeteroCache.load(path, llama(change))


def test_the_context_cache_depends_on_the_active_adapters(tmp_path, caplog):
    prefixes = PrefixCache(ContextStore(tmp_path), writes=True)
    model = llama(adapted)
    tokens = (torch.arange(100) % 90 + 2).tolist()
    prompt = [*tokens, 7, 8]
    cache = HeteroCache(model)
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=cache)
    prefixes.keep(cache, tokens, {})
    assert prefixes.with_stored_prefix(HeteroCache(model), prompt).get_seq_length() == 100
    for adapter in adapters(model):
        adapter.active_adapters = ["B"]
    assert prefixes.with_stored_prefix(HeteroCache(model), prompt) is None
    handle = model.lm_head.register_forward_hook(lambda *args: None)
    assert prefixes.with_stored_prefix(HeteroCache(model), prompt) is None
    assert "has a forward hook" in caplog.text
    handle.remove()


def test_offloaded_weights_are_known_by_their_numbers(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    path, cpu = tmp_path / "context.safetensors", torch.device("cpu")
    prefilled(llama()).save(path)
    HeteroCache.load(path, llama(lambda model: accelerate.cpu_offload(model, execution_device=cpu)))

    def other(model):
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
        accelerate.disk_offload(model, tmp_path / "offloaded", execution_device=cpu)

    with pytest.raises(ContextError, match="saved with other weights"):
        HeteroCache.load(path, llama(other))
    with pytest.raises(ContextError, match="on the meta device"):
        getattr(prefilled(llama()).injection.model.to("meta").hetero_kv_injection, "identity")  # noqa: B009


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 3 * 4096), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool]),
    place=st.floats(0, 1, exclude_max=True), other=st.floats(0, 1, exclude_max=True), inference=st.booleans(),
)  # fmt: skip
def test_every_number_of_a_tensor_counts_and_its_place(size, dtype, place, other, inference):
    digests = TensorDigests()
    with torch.inference_mode(inference):
        numbers = torch.arange(size).remainder(251).to(dtype)
        (first,) = digests.of([numbers])
        assert digests.of([numbers]) == [first] == TensorDigests().of([numbers.clone()])
        one, two = int(place * size), int(other * size)
        changed = numbers.clone()
        changed[[one, two]] = numbers[[two, one]]
        numbers.copy_(changed)
        expected = TensorDigests().of([changed])
        assert digests.of([numbers]) == expected
        numbers[one] = not numbers[one] if dtype is torch.bool else 252
        assert digests.of([numbers]) == TensorDigests().of([numbers.clone()]) != expected


def test_unchanged_tensors_are_hashed_once(monkeypatch):
    hashed = []
    monkeypatch.setattr("hetero_kv.contexts.tensor_digests._hashed", lambda data: hashed.append(len(data)) or b"")
    digests, tensors = TensorDigests(), [torch.ones(1000), torch.zeros(3, 5)]
    digests.of(tensors)
    tensors[0][7] = 2
    digests.of(tensors)
    assert sorted(hashed) == [60, 4000, 4000]
