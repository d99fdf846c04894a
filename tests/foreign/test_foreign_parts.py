"""Hooks, adapters and wrappers of other packages work under rules as without them, or are refused by name."""

from __future__ import annotations

import contextlib
import functools
import importlib.util

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.foreign import is_known_class
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.replacement import Operator
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from hetero_kv.models.gguf.architectures import ARCHITECTURES
from tests.foreign.llamas import EVERYTHING, ROUNDING, computed, difference, injected, llama, untouched
from tests.support.tiny_models import tiny_model

LINEAR = ["model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
PARTS = [
    *LINEAR, "model.embed_tokens", "model.layers.0", "model.layers.1.self_attn", "model.layers.0.input_layernorm",
    "model.layers.1.mlp", "model.layers.0.mlp.act_fn", "model.norm", "lm_head",
]  # fmt: skip
INNERMOST = [*LINEAR, "model.layers.0.input_layernorm", "model.layers.0.mlp.act_fn", "model.norm"]


def own(module):
    """The model's module beneath operators."""
    return own(module.wrapped) if isinstance(module, Operator) else module


def scaled(output):
    return (scaled(output[0]), *output[1:]) if isinstance(output, tuple) else output * 3


class Scaled(nn.Module):
    """A wrapper of somebody else's."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return scaled(self.inside(x))


class Scales(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight * 3


def hook(module):
    module.register_forward_hook(lambda module, args, output: scaled(output))


def pre_hook(module):
    module.register_forward_pre_hook(lambda module, args: (args[0] * 3, *args[1:]) if args else None)


def replaced_forward(module):
    forward = module.forward

    @functools.wraps(forward)
    def theirs(*args, **kwargs):
        return scaled(forward(*args, **kwargs))

    module.forward = theirs


def own_class(module):
    class Own(type(module)):
        def forward(self, *args, **kwargs):
            return scaled(super().forward(*args, **kwargs))

    module.__class__ = Own


def in_place(module):
    with torch.no_grad():
        module.weight.mul_(3)


def by_data(module):
    module.weight.data *= 3


def other_data(module):
    module.weight.data = module.weight.data * 3


def other_parameter(module):
    module.weight = nn.Parameter(module.weight.detach() * 3)


#: What somebody does to a module, and to which.
CHANGES = {
    hook: PARTS,
    pre_hook: INNERMOST,
    replaced_forward: PARTS,
    own_class: INNERMOST,
    in_place: [*LINEAR, "model.layers.0.input_layernorm", "model.norm"],
    by_data: [*LINEAR, "model.layers.0.input_layernorm", "model.norm"],
    other_data: [*LINEAR, "model.layers.0.input_layernorm"],
    other_parameter: [*LINEAR, "model.layers.0.input_layernorm"],
    lambda module: parametrize.register_parametrization(module, "weight", Scales()): LINEAR,
    lambda module: parametrizations.weight_norm(module): LINEAR,
    lambda module: nn.utils.weight_norm(module): LINEAR,
    lambda module: prune.l1_unstructured(module, "weight", 0.5): LINEAR,
}


class Refused(Exception):
    """torch has found no weight on an operator that something could be put on."""


def put(change, module):
    # What a packed matrix leaves in the module beneath has no numbers that a change could count in.
    if change not in (hook, pre_hook, replaced_forward, own_class) and not module.weight.numel():
        raise Refused
    try:
        change(module)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        assert isinstance(module, Operator)
        raise Refused from error


MOMENTS = ["before", "after", "after a prompt"]

drawn_changes = st.sampled_from(list(CHANGES)).flatmap(
    lambda change: st.tuples(st.just(change), st.sampled_from(CHANGES[change]))
)


@settings(max_examples=6, deadline=None)
@given(
    drawn=st.lists(st.tuples(drawn_changes, st.sampled_from(MOMENTS), st.booleans()),
                   min_size=1, max_size=2),
    weights=st.sampled_from(["as_stored", "q8_0"]),
)  # fmt: skip
def test_foreign_hooks_and_wrappers_work_or_are_refused(drawn, weights):
    work_or_are_refused(drawn, weights)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    drawn=st.lists(st.tuples(drawn_changes, st.sampled_from(MOMENTS), st.booleans()),
                   min_size=1, max_size=2),
    weights=st.sampled_from(["as_stored", "q8_0"]),
)  # fmt: skip
def test_more_foreign_hooks_and_wrappers_work_or_are_refused(drawn, weights):
    work_or_are_refused(drawn, weights)


def work_or_are_refused(drawn, weights):
    plain, model = llama(), llama()
    try:
        for (change, path), _, _ in sorted(drawn, key=lambda each: MOMENTS.index(each[1])):
            change(plain.get_submodule(path))
        expected = untouched(plain)
    except (KeyError, ValueError, AttributeError, TypeError, RuntimeError):
        # torch does not put both on one weight, or does not compute with both.
        reject()
    with contextlib.suppress(Refused, HeteroKVError):
        if weights == "q8_0":
            # The same changes, there before the rules: rounded in the same way.
            expected = computed(injected(plain, weights=weights))
        for moment in MOMENTS:
            if moment == "after":
                injected(model, weights=weights)
            if moment == "after a prompt":
                computed(model)
            for (change, path), when, beneath in drawn:
                if when == moment:
                    module = model.get_submodule(path)
                    put(change, own(module) if beneath else module)
        got = computed(model)
        assert difference(got, expected) < (1e-4 if weights == "as_stored" else ROUNDING)


def layers(model):
    return [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]


def test_a_token_passes_natively_again_when_its_layer_is_plain_again():
    model = injected(llama(), weights="q8_0")
    logits = computed(model)
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers(model))
    heard = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: heard.append(output))
    assert difference(computed(model), logits) < 1e-3
    # A prompt of three chunks, and three tokens; nobody hears a trial.
    assert [output.shape[1] for output in heard] == [16, 16, 8, 1, 1, 1]
    assert [isinstance(layer._native, FusedDecodeLayer) for layer in layers(model)] == [False, True]
    handle.remove()
    assert torch.equal(computed(model), logits)
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers(model))


def test_a_weight_that_is_not_contiguous_counts_when_it_changes_in_place():
    models = llama(), llama()
    for model in models:
        norm = model.model.layers[0].input_layernorm
        norm.weight = nn.Parameter(norm.weight.detach().repeat_interleave(2)[::2], requires_grad=False)
        assert not norm.weight.is_contiguous()
    model, expected = injected(models[0], weights="q8_0"), models[1]
    before = computed(model)
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers(model))
    in_place(model.model.layers[0].wrapped.input_layernorm)
    in_place(expected.model.layers[0].input_layernorm)
    found = computed(model)
    assert difference(found, computed(injected(expected, weights="q8_0"))) < 1e-6
    assert difference(found, before) > 1e-3
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers(model))


def test_hooks_on_every_linear_layer_are_called_where_weights_are_packed():
    model = injected(llama(), weights="q8_0")
    heard = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output, name=name: heard.append(name))
    computed(model)
    assert len(heard) == 14 * (3 + 3) + 4
    assert len(set(heard)) == 15


def test_a_norm_in_bfloat16_that_is_changed_counts_in_the_next_token():
    model = injected(llama().to(torch.bfloat16), weights="q8_0")
    before = computed(model)
    model.model.layers[1].post_attention_layernorm.weight.data.mul_(3)
    after = computed(model)
    assert difference(after, before) > 0.1
    for layer in layers(model):
        layer._native = None
    assert difference(after, computed(model)) < 3e-2


def test_a_compiled_model_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="_orig_mod"):
        inject(torch.compile(llama(), backend="eager"), "quest", command_line=EVERYTHING)


def test_infinigen_looks_ahead_of_no_layer_that_somebody_listens_to():
    model = tiny_model("llama", num_hidden_layers=4)
    inject(model, "infinigen", command_line={"max_seq_len": 128})
    heard = []
    projection = model.get_submodule("model.layers.2.self_attn.q_proj")
    projection.register_forward_hook(lambda module, args, output: heard.append(output.shape[1]))
    computed(model)
    assert heard.count(1) == 3


def test_eject_gives_back_a_forward_that_was_there_before():
    model, heard = llama(), []
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: heard.append(1) or forward(*args, **kwargs)
    expected = untouched(model)
    injected(model)
    assert difference(computed(model), expected) < 1e-4
    count = len(heard)
    eject(model)
    assert torch.equal(untouched(model), expected)
    assert len(heard) == count + 1


def test_layers_taken_out_after_inject_are_refused_by_name():
    model = injected(llama())
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    with pytest.raises(
        HeteroKVError, match=r"1 layers \(num_hidden_layers\), and model\.layers\.1\.self_attn is layer 1"
    ):
        HeteroCache(model)


def test_a_forward_that_wraps_a_class_of_transformers_counts(monkeypatch):
    model = injected(llama())
    before = computed(model)
    kind = type(own(model.model.layers[0].mlp))
    monkeypatch.setattr(
        kind, "forward", functools.wraps(kind.forward)(lambda self, x, forward=kind.forward: forward(self, x) * 2)
    )
    assert difference(computed(model), untouched(llama())) < 1e-4
    assert difference(computed(model), before) > 0.1


def test_the_modules_of_every_architecture_are_known():
    """A class that counts as foreign loses all fast paths without a word, as experts' once did."""
    unknown = {}
    for model_type in sorted({each for table in ARCHITECTURES.values() for each in table.model_types}):
        config = CONFIG_MAPPING[model_type]
        package = config.__module__.rpartition(".")[0]
        name = f"{package}.modeling_{package.rpartition('.')[2]}"
        if importlib.util.find_spec(name) is None:
            # Another model's classes with a configuration of its own.
            name = MODEL_FOR_CAUSAL_LM_MAPPING[config].__module__
        modeling = importlib.import_module(name)
        for name, kind in vars(modeling).items():
            is_module = isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == modeling.__name__
            if is_module and not is_known_class(kind):
                unknown[f"{model_type}.{name}"] = kind.forward.__globals__["__name__"]
    assert not unknown
