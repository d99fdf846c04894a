"""The metadata of a GGUF file is used, known to be without effect, or refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from hetero_kv.models import ModelError
from hetero_kv.models.gguf.architectures import ARCHITECTURES
from hetero_kv.models.gguf.architectures.declaration import MetadataReader
from hetero_kv.models.gguf.architectures.rope import llama3_factors, partial_factor, rope_parameters
from hetero_kv.models.gguf.config_from_file import adapt, configuration_of, settings_of
from tests.models.tiny_gguf import header, value

words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
keys = st.lists(words, min_size=1, max_size=3).map(".".join)


@given(prefix=st.sampled_from(["qwen2.", "general.", "llama.", ""]), key=keys)
def test_a_key_that_nothing_reads_is_refused_by_its_name_and_value(prefix, key):
    file = header("qwen2")
    key = f"{prefix}made_up_{key}"
    with pytest.raises(
        ModelError, match=rf"tiny\.gguf' has metadata that this version does not support: {key} 3; give"
    ):
        configuration_of(replace(file, metadata=file.metadata | {key: value(3)}))


def test_keys_that_change_nothing_are_left():
    file = header("qwen2")
    harmless = {
        "general.name": "x",
        "general.license.link": "x",
        "general.base_model.0.repo_url": "x",
        "general.sampling.temp": 0.7,
        "general.quantization_version": 2,
        "general.type": "model",
        "quantize.imatrix.entries_count": 168,
        "mradermacher.quantized_by": "x",
        "split.count": 1,
        "tokenizer.ggml.fim_pre_token_id": 3,
        "tokenizer.chat_template.tool_use": "x",
        "qwen2.rope.scaling.finetuned": False,
        "qwen2.pooling_type": 0,
    }
    added = replace(file, metadata=file.metadata | {key: value(given) for key, given in harmless.items()})
    assert configuration_of(added).to_dict() == configuration_of(file).to_dict()


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_a_file_of_something_else_than_a_model_is_refused(kind):
    file = header("llama")
    with pytest.raises(ModelError, match=rf"has general\.type '{kind}' \(.+\); give the file of the model itself"):
        configuration_of(replace(file, metadata=file.metadata | {"general.type": value(kind)}))


def test_an_architecture_without_a_table_is_refused_as_such():
    with pytest.raises(ModelError, match=r"has the GGUF architecture 'gptj', which is not supported yet; give the"):
        configuration_of(header("gptj"))


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "feed_forward_length"])
def test_a_key_that_is_missing_is_named(key):
    with pytest.raises(ModelError, match=rf"has no llama\.{key} in its metadata; .* as gguf_path"):
        configuration_of(header("llama", {key: None}))


ROPE = {
    "nothing": ({}, {"rope_type": "default", "rope_theta": 10_000.0}),
    "base": ({"rope.freq_base": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "a factor without a type": ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "the factor's old name": ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "a factor of nothing": ({"rope.scaling.factor": 0.0}, {"rope_type": "default"}),
    "a factor of one": ({"rope.scale_linear": 1.0}, {"rope_type": "default"}),
    "a factor of no type": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
    "yarn": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
    ),
    "yarn of the whole context": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope_type": "yarn", "original_max_position_embeddings": 512},
    ),
    "yarn of another size": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
        {"rope_type": "yarn", "attention_factor": 0.5 * (0.1 * math.log(4) + 1)},
    ),
}


@pytest.mark.parametrize("case", ROPE)
def test_positions_are_rotated_as_llama_cpp_rotates_them(case):
    metadata, expected = ROPE[case]
    rope = configuration_of(header("llama", metadata)).rope_parameters
    assert {name: rope[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("llama", {"rope.scaling.attn_factor": 0.7}, r"llama\.rope\.scaling\.attn_factor 0\.7, which scales queries"),
        ("llama", {"rope.scaling.type": "ntk"}, r"rope\.scaling\.type 'ntk', which is an unknown scaling"),
        ("llama", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5, which is a scaling"),
        (
            "llama",
            {"rope.dimension_count": 8, "attention.key_length": 16},
            "dimension_count 8, which is not the head's 16",
        ),
        ("llama", {"attention.value_length": 8}, "value_length 8, which differs from the key's 16"),
        ("llama", {"attention.head_count_kv": [1, 2]}, r"head_count_kv \(1, 2\), which differs between layers"),
        ("llama", {"expert_used_count": 2}, "expert_used_count 2, which chooses experts"),
        ("llama", {"vocab_size": 96}, "vocab_size 96, which is not the 97 rows of token_embd"),
        ("llama", {"attention.causal": False}, "attention.causal False, which is of a model that generates no text"),
        (
            "stablelm",
            {"attention.key_length": 32, "attention.layer_norm_epsilon": 1e-5},
            "key_length 32, which is not the hidden size divided by the heads",
        ),
        (
            "nemotron",
            {"attention.key_length": 32, "rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-5},
            "dimension_count 8, which is a part of 16, and the model rotates that part of a head's 32",
        ),
        ("qwen2", {"rope.dimension_sections": [8, 4, 4, 0]}, "dimension_sections .*, which divides a head"),
        ("granite", {"rope.scaling.finetuned": False}, "finetuned False, which means a model without RoPE"),
        ("olmo", {"attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06, which is not the model's 0.00001"),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]},
            "has not one value for each",
        ),
    ],
)
def test_unsupported_metadata_is_refused_with_its_value(architecture, metadata, message):
    with pytest.raises(ModelError, match=message):
        configuration_of(header(architecture, metadata))


def rotated(monkeypatch, factors, base, dim):
    monkeypatch.setattr(MetadataReader, "tensor", lambda reader, name: factors if name == "rope_freqs.weight" else None)
    file = header("llama", {"rope.freq_base": base})
    found, stated = rope_parameters(MetadataReader(file, ARCHITECTURES["llama"], None), dim)
    assert "rope_type" in stated
    return found


@given(
    factor=st.floats(1.5, 64),
    high=st.floats(1.5, 16),
    original=st.integers(64, 65_536),
    base=st.floats(1_000, 1e6),
    dim=st.sampled_from([16, 64, 128]),
)
def test_llama_3s_scaling_is_found_again_in_its_outcome(factor, high, original, base, dim):
    with pytest.MonkeyPatch.context() as patch:
        base = header("llama", {"rope.freq_base": base}).get("llama.rope.freq_base")
        says = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
        factors = llama3_factors(says | {"original_max_position_embeddings": original}, base, dim)
        if max(factors) != factor:
            return  # no frequency is low enough to be divided by all of it
        found = rotated(patch, factors, base, dim)
        again = llama3_factors(found, base, dim) if found["rope_type"] == "llama3" else [found["factor"]] * len(factors)
        assert again == pytest.approx(factors, rel=1e-4)


def test_llama_3s_published_scaling_is_found_as_published(monkeypatch):
    published = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = rotated(monkeypatch, llama3_factors(published, 5e5, 128), 5e5, 128)
    assert found == {"rope_type": "llama3", "rope_theta": 5e5, **published}


@pytest.mark.parametrize("factors", [[3.0, 1.0, 2.0, 5.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 7, [0.0] * 8])
def test_other_factors_of_frequencies_are_refused(monkeypatch, factors):
    with pytest.raises(ModelError, match=r"has a tensor rope_freqs\.weight .* that is no scaling"):
        rotated(monkeypatch, factors, 1e4, 16)


def test_factors_of_a_long_context_are_the_tensors(monkeypatch):
    long, short = [2.0] * 4, [1.0] * 4
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    monkeypatch.setattr(MetadataReader, "tensor", lambda reader, name: tensors.get(name))
    metadata = {
        "rope.dimension_count": 8,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": 1.25,
    }
    rope = configuration_of(header("phi3", metadata)).rope_parameters
    assert rope["rope_type"] == "longrope"
    assert (rope["long_factor"], rope["short_factor"], rope["factor"]) == (long, short, 4.0)
    assert (rope["partial_rotary_factor"], rope["attention_factor"]) == (0.5, 1.25)


def test_a_rotation_that_only_one_tensor_says_is_refused(monkeypatch):
    monkeypatch.setattr(MetadataReader, "tensor", lambda reader, name: [1.0] * 8 if "long" in name else None)
    with pytest.raises(ModelError, match=r"one of rope_factors_long\.weight and"):
        configuration_of(header("phi3"))


@given(dim=st.integers(1, 128).map(lambda half: 2 * half), data=st.data())
def test_a_share_of_a_head_is_that_many_dimensions(dim, data):
    count = 2 * data.draw(st.integers(1, dim // 2))
    assert int(dim * partial_factor(count, dim)) == count


def test_windows_are_of_the_layers_that_a_file_says():
    def kinds(**metadata):
        config = configuration_of(header("gemma3", {"block_count": 7, **metadata}))
        return "".join("S" if kind == "sliding_attention" else "F" for kind in config.layer_types)

    window = {"attention.sliding_window": 8}
    assert kinds() == "FFFFFFF"
    assert kinds(**window) == "SSSSSFS"
    assert kinds(**window, **{"attention.sliding_window_pattern": 3}) == "SSFSSFS"
    pattern = [True, False, False, True, True, True, False]
    assert kinds(**window, **{"attention.sliding_window_pattern": pattern}) == "SFFSSSF"


def test_attention_lies_where_a_list_says_or_at_an_interval_before_predicting_blocks():
    def kinds(**metadata):
        sizes = {f"ssm.{name}": 4 for name in ("conv_kernel", "state_size", "group_count", "time_step_rank")}
        config = configuration_of(header("qwen35", {"block_count": 5, **sizes, **metadata}))
        return "".join("L" if kind == "linear_attention" else "F" for kind in config.layer_types)

    assert kinds() == "LLLFL"
    assert kinds(full_attention_interval=2) == "LFLFL"
    assert kinds(full_attention_interval=2, nextn_predict_layers=2) == "LFL"
    pattern = {"attention.recurrent_layers": [True, True, False, False, True]}
    assert kinds(full_attention_interval=2, **pattern) == "LLFFL"
    assert kinds(nextn_predict_layers=1, **pattern) == "LLFF"


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_the_largest_gemmas_are_scaled_by_the_width(architecture, layers):
    metadata = {"attention.key_length": 32, "attention.value_length": 32}
    assert configuration_of(header(architecture, metadata)).query_pre_attn_scalar == 32
    assert configuration_of(header(architecture, metadata | {"block_count": layers})).query_pre_attn_scalar == 16


def test_soft_caps_are_the_files():
    assert configuration_of(header("gemma2")).attn_logit_softcapping == 50
    config = configuration_of(header("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.0}))
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (5, None)


def test_biases_are_where_a_file_has_them():
    tensors = {"blk.0.attn_q.bias": (64,), "blk.0.ffn_down.bias": (64,)}
    config = configuration_of(header("llama", tensors=tensors))
    assert (config.attention_bias, config.mlp_bias) == (True, True)
    plain = configuration_of(header("llama"))
    assert (plain.attention_bias, plain.mlp_bias) == (False, False)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [("gptneox", "attention.head_count"), ("qwen35", "ssm.group_count"), ("qwen35", "ssm.time_step_rank")],
)
def test_a_size_of_nothing_is_refused(architecture, key):
    metadata = {f"ssm.{name}": 4 for name in ("conv_kernel", "state_size", "group_count", "time_step_rank")}
    epsilon = {"attention.layer_norm_epsilon": 1e-5} if architecture == "gptneox" else metadata
    with pytest.raises(ModelError, match=rf"has the size 0, which no model has \(.*{key}"):
        configuration_of(header(architecture, epsilon | {"attention.head_count_kv": 4, key: 0}))


def test_a_window_that_a_llamas_file_says_is_mistrals():
    config = configuration_of(header("llama", {"attention.sliding_window": 8}))
    assert (config.model_type, config.sliding_window) == ("mistral", 8)


def test_starcoder_2_rotates_by_the_files_base():
    metadata = {"rope.freq_base": 1e6, "attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None}
    assert configuration_of(header("starcoder2", metadata)).rope_parameters["rope_theta"] == 1e6


def given_beside(**changes):
    config = configuration_of(header("qwen2", {"rope.freq_base": 1e6}))
    return AutoConfig.for_model(**config.to_dict() | changes)


def test_a_configuration_that_says_the_same_is_taken_as_it_is():
    config = given_beside(hidden_act="gelu", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    adapt(config, header("qwen2", {"rope.freq_base": 1e6}))
    assert (config.hidden_act, config.sliding_window, config.tie_word_embeddings) == ("gelu", 16, True)
    # What a file does not say is the configuration's.
    adapt(config, header("qwen2", {"block_count": None, "embedding_length": None, "attention.head_count": None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"intermediate_size": 128},
            r"has intermediate_size 96 \(qwen2\.feed_forward_length\) and the configuration 128",
        ),
        ({"rms_norm_eps": 1e-5}, r"has rms_norm_eps 1e-06 \(qwen2\.attention\.layer_norm_rms_epsilon\) and"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, r"has rope_parameters .*rope\.\*\) and"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
            r"has rope_parameters .*'default'.*\) and the configuration",
        ),
    ],
)
def test_a_configuration_that_says_something_else_is_refused(changes, message):
    file = header("qwen2", {"rope.freq_base": 1e6, "rope.scaling.type": "none"})
    with pytest.raises(ModelError, match=message):
        adapt(given_beside(**changes), file)


def test_a_configuration_of_another_model_is_refused():
    with pytest.raises(ModelError, match="has weights of gemma2 and the configuration is of qwen2; give"):
        adapt(given_beside(), header("gemma2"))


WINDOWED = {
    "llama": {},
    "qwen3": {"attention.key_length": 32, "attention.value_length": 32},
    "gemma2": {"attention.sliding_window": 8, "attn_logit_softcapping": 5.0},
    "gemma3": {"attention.sliding_window": 8, "attention.key_length": 32, "attention.value_length": 32},
    "phi3": {"rope.dimension_count": 8, "rope.scaling.original_context_length": 128},
}


@given(architecture=st.sampled_from(sorted(WINDOWED)), changed=st.integers(0, 128) | st.just([1, 2]), data=st.data())
def test_a_value_is_used_or_refused_by_an_error_of_ours(architecture, changed, data):
    file = header(architecture, WINDOWED[architecture])
    key = data.draw(st.sampled_from(sorted(set(file.metadata) - {"general.architecture"})))
    try:
        settings = settings_of(replace(file, metadata=file.metadata | {key: value(changed)}))
    except ModelError:
        return
    found = [setting for by, setting in settings.from_file.values() if by == key or by.endswith("rope.*")]
    assert found, f"{key} is read and nothing comes of it"
