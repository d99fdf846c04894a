"""A model loaded from a GGUF file alone computes what the original model computes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hetero_kv import HeteroCache, eject, inject, load_model, open_model
from hetero_kv.adapter.quantized_experts import QuantizedExperts
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.models import ModelError
from hetero_kv.models.gguf.architectures import ARCHITECTURES
from hetero_kv.models.gguf.architectures.unsupported import (
    COMPUTED_OTHERWISE,
    DIFFUSION,
    DRAFT,
    ENCODER_DECODER,
    NO_CLASS,
    NO_GENERATOR,
    WITHIN_ANOTHER,
)
from hetero_kv.rules.matching import InjectionError
from tests.gguf.logit_errors import IDS, PACKED_TOLERANCE, SLOWEST, TOLERANCE, relative_error
from tests.support.gguf_models.conversion import write
from tests.support.gguf_models.variants import VARIANTS, tiny_model, vocabulary_of

Q8_0 = GGMLQuantizationType.Q8_0
PROMPT, WHOLE = 40, 56
COVERING = {"max_seq_len": 128, "kv_type": "FP32"}
#: Of rules that store no keys and values.
LENGTH = {"max_seq_len": 128}
#: The rules of `dense` are for modules of other names.
WITHOUT_RULES = {"falcon", "bloom", "dbrx", "mpt"}
#: Whose state is not given back as keys and values are.
ONLY_STATE = {"mamba", "mamba2"}
#: Layers use the keys and values of others.
SHARED_KEYS = ("gemma4: keys of other layers",)
#: Layers pass several streams of hidden states.
STREAMS = {
    "qwen4exp": "attn_hyper_connection",
    **dict.fromkeys(("gemma3n", "gemma3n: keys of other layers"), "altup"),
    **dict.fromkeys(("deepseek4", "hy_v4"), "attn_hc"),
}
#: Tokens pass layers several times.
PASSED_AGAIN = ("hrm_text",)
#: Layers attend to tokens that they choose.
OTHER_ATTENTION = {
    **dict.fromkeys(("deepseek32", "glm-dsa", "dots3note"), "indexed_attention"),
    "minimax-m3": "minimax_m3_sparse",
}
#: One of each way in which layers differ; the others are slow.
QUICK = ("llama: biases", "qwen3moe", "gemma3", "gpt-oss", "lfm2", "falcon-h1", "nemotron_h_moe", "mamba", "qwen35")
UNDER_RULES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in VARIANTS
    if name.partition(":")[0] not in WITHOUT_RULES | OTHER_ATTENTION.keys()
    and name not in (*SHARED_KEYS, *STREAMS, *PASSED_AGAIN)
]


@cache
def loaded(path):
    """The model of a file, which no test changes."""
    return load_model(path, dtype="float32", device="cpu").model


def in_turns(model, cache=None):
    """Logits of a prompt, a second turn, and two single tokens."""
    steps = (0, PROMPT, WHOLE - 2, WHOLE - 1, WHOLE)
    found = []
    for start, end in pairwise(steps):
        answer = model(IDS[:, start:end], past_key_values=cache, use_cache=True)
        # Of a model that keeps no keys, a state.
        cache = cache if cache is not None else getattr(answer, "past_key_values", None)
        found.append(answer.logits)
    return torch.cat(found, dim=1)


def answers(model):
    """Greedy and drawn tokens behind the prompt."""
    torch.manual_seed(3)
    usual = {"max_new_tokens": 6, "min_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    found = [
        model.generate(IDS[:, :PROMPT], do_sample=drawn, temperature=1.5 if drawn else None, **usual)
        for drawn in (False, True)
    ]
    return torch.cat(found)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == SLOWEST else name for name in VARIANTS]
)
def test_logits_of_a_prompt_and_a_second_turn_are_the_originals(written, name):
    file = written(name)
    model = loaded(file.path)
    assert relative_error(model(IDS).logits, file.original(IDS).logits).max() < TOLERANCE
    if name.partition(":")[0] not in ONLY_STATE:
        assert relative_error(in_turns(model), in_turns(file.original)).max() < TOLERANCE


def test_logits_behind_tokens_of_which_one_was_made_are_the_originals(written):
    # Of 128, by the layers of DeepSeek V4 that keep least.
    file, ids = written("deepseek4"), torch.randint(5, 250, (1, 150), generator=torch.Generator().manual_seed(1))
    found, expected = loaded(file.path)(ids).logits, file.original(ids).logits
    assert relative_error(found, expected)[128:].max() < TOLERANCE


def test_the_end_of_sequences_of_tokens_is_beside_that_of_texts(tmp_path):
    original, end = tiny_model("qwen4exp"), int(IDS[0, 10])
    path = write(tmp_path / "end.gguf", original, vocabulary_of("qwen4_exp_text"), ple__eos_token_id=end)
    original.model.layers[1].ple.ple_embedding.eos_token_id = end
    model = load_model(path, dtype="float32", device="cpu").model
    assert model.config.eos_token_id == [end, original.config.eos_token_id]
    assert relative_error(model(IDS).logits, original(IDS).logits).max() < TOLERANCE


# What its logits do not tell: how tokens are drawn from them, which is the same in most.
DRAWN = ("llama", "gemma3", "gpt-oss", "qwen2moe", "lfm2", "gpt2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DRAWN else pytest.mark.slow) for name in VARIANTS if ":" not in name],
)
def test_greedy_and_drawn_tokens_are_the_originals(written, name):
    file = written(name)
    assert torch.equal(answers(loaded(file.path)), answers(file.original))


@pytest.mark.parametrize("name", UNDER_RULES)
def test_under_rules_that_keep_everything_the_logits_are_the_originals(written, name):
    file = written(name)
    opened = open_model(file.path, dtype="float32", device="cpu")
    inject(opened.model, "dense", command_line=LENGTH if name.partition(":")[0] in ONLY_STATE else COVERING)
    model = opened.load().model
    assert relative_error(in_turns(model, HeteroCache(model)), file.original(IDS).logits).max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", pytest.param("bloom", marks=pytest.mark.slow), "gpt2", "qwen2moe"])
def test_matrices_in_blocks_are_the_originals(written, name):
    file = written(name, Q8_0)
    assert relative_error(loaded(file.path)(IDS).logits, file.original(IDS).logits).max() < TOLERANCE


@pytest.mark.parametrize("name", UNDER_RULES)
def test_packed_weights_compute_what_the_original_does(written, name):
    file = written(name, Q8_0)
    opened = open_model(file.path, dtype="float32", device="cpu")
    inject(opened.model, "dense", command_line=LENGTH if name.partition(":")[0] in ONLY_STATE else COVERING)
    model = opened.load().model
    # A token whose experts are chosen by a hair may have others.
    assert relative_error(in_turns(model, HeteroCache(model)), file.original(IDS).logits).median() < PACKED_TOLERANCE


def test_experts_of_llama_4_stay_packed_until_they_are_ejected(written):
    file = written("llama4", Q8_0)
    opened = open_model(file.path, dtype="float32", device="cpu")
    inject(opened.model, "dense", command_line=COVERING)
    model = opened.load().model
    packed = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    assert [[weights.name for weights in module.packed_weights()] for module in packed] == [["Q8_0"] * 3] * 2
    found, expected = in_turns(model, HeteroCache(model)), file.original(IDS).logits
    assert relative_error(found, expected).median() < PACKED_TOLERANCE
    eject(model)
    assert relative_error(model(IDS).logits, expected).max() < TOLERANCE


@pytest.mark.parametrize("name", sorted(WITHOUT_RULES))
def test_rules_that_find_no_attention_are_refused_by_name(written, name):
    opened = open_model(written(name).path, dtype="float32", device="cpu")
    with pytest.raises(InjectionError, match="matches no module"):
        inject(opened.model, "dense", command_line=COVERING)


@pytest.mark.parametrize(("name", "part"), STREAMS.items())
def test_rules_for_layers_with_several_streams_are_refused_by_name(written, name, part):
    opened = open_model(written(name).path, dtype="float32", device="cpu")
    with pytest.raises(UnsupportedModelError, match=rf"model\.layers\.0 .*passes several streams .*\({part}\)"):
        inject(opened.model, "dense", command_line=COVERING)


@pytest.mark.parametrize("rule", ["ChunkedDecoderLayer", "RetrievalAttention"])
@pytest.mark.parametrize("name", PASSED_AGAIN)
def test_rules_for_layers_that_are_passed_several_times_are_refused_by_name(written, tmp_path, name, rule):
    place = r"\.layers\.\d+$" if rule == "ChunkedDecoderLayer" else r"\.self_attn$"
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"- match: {{name: '{place}'}}\n  replace: {{class: hetero_kv.operators.{rule}}}\n")
    opened = open_model(written(name).path, dtype="float32", device="cpu")
    with pytest.raises(UnsupportedModelError, match=r"model\.L_module\.layers\.0.*several times"):
        inject(opened.model, rules)


@pytest.mark.parametrize(("name", "kind"), OTHER_ATTENTION.items())
def test_rules_for_layers_that_attend_otherwise_are_refused_by_name(written, name, kind):
    opened = open_model(written(name).path, dtype="float32", device="cpu")
    with pytest.raises(UnsupportedModelError, match=rf"layer \d of \w+ has the layer type '{kind}'"):
        inject(opened.model, "dense", command_line=COVERING)


@pytest.mark.parametrize("name", SHARED_KEYS)
def test_rules_for_layers_with_keys_of_others_are_refused_by_name(written, name):
    opened = open_model(written(name).path, dtype="float32", device="cpu")
    with pytest.raises(UnsupportedModelError, match=r"layers\.\d\.self_attn .*the keys and values of another layer"):
        inject(opened.model, "dense", command_line=COVERING)


def test_an_architecture_without_a_table_is_refused_by_name(written, tmp_path):
    model = written("qwen2").original
    path = write(tmp_path / "unknown.gguf", model, vocabulary_of("qwen2"))
    path.write_bytes(path.read_bytes().replace(b"qwen2", b"qwen9"))
    with pytest.raises(ModelError, match=r"unknown\.gguf.*'qwen9', which is not supported"):
        load_model(path)


def test_minimax_01_is_refused_for_what_transformers_computes_otherwise(tmp_path):
    writer = GGUFWriter(tmp_path / "minimax.gguf", "minimax-01")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'minimax-01', whose heads are rotated by half"):
        load_model(tmp_path / "minimax.gguf")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grok", "transformers has no class for"),
        ("llada", "fills in masked words"),
        ("t5", "reads a prompt by an encoder"),
        ("bert", "generates no text"),
        ("dflash", "drafts tokens for another"),
        ("step35", "transformers computes only as a part"),
    ],
)
def test_an_architecture_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path, name, message):
    writer = GGUFWriter(tmp_path / "other.gguf", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"other\.gguf' has the GGUF architecture '{name}', which {message}"):
        load_model(tmp_path / "other.gguf")


def test_no_architecture_is_loaded_and_refused():
    refused = [NO_CLASS, DIFFUSION, ENCODER_DECODER, NO_GENERATOR, DRAFT, WITHIN_ANOTHER, frozenset(COMPUTED_OTHERWISE)]
    assert len(frozenset().union(*refused)) == sum(map(len, refused))
    assert not frozenset().union(*refused) & ARCHITECTURES.keys()
    assert not {name.replace("-", "_") for name in NO_CLASS} & CONFIG_MAPPING_NAMES.keys()


def test_every_architecture_with_a_table_has_a_variant():
    assert set(ARCHITECTURES) <= {name.partition(":")[0] for name in VARIANTS}


def test_a_variant_is_always_the_same_model():
    one, other = (tiny_model("llama: biases").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
