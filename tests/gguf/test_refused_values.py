"""Impossible values of a file's keys are refused by name, and missing keys have llama.cpp's defaults."""

from __future__ import annotations

import re

import pytest

from hetero_kv import load_model
from hetero_kv.models import ModelError
from hetero_kv.models.gguf import metadata_ranges
from hetero_kv.models.gguf.config_from_file import configuration_of, settings_of
from hetero_kv.models.gguf.file import GGUFFile
from tests.gguf.logit_errors import IDS, SLOWEST, TOLERANCE, relative_error
from tests.support.gguf_models.container import Layout, array, scalar
from tests.support.gguf_models.variants import VARIANTS

UINT32, FLOAT32, BOOL, STRING, UINT64 = 4, 6, 7, 8, 10
DECLARED = {
    *metadata_ranges.INTEGER_RANGES,
    *metadata_ranges.EXCLUSIVE_RANGES,
    *metadata_ranges.RANGES,
    *metadata_ranges.BOOLEANS,
    *metadata_ranges.STRINGS,
    *metadata_ranges.LISTS,
    *metadata_ranges.FLOAT_LISTS,
}


@pytest.fixture
def changed(written, tmp_path):
    """name of a variant, keys behind the architecture's name (with "__" for ".") -> its file with other values."""

    def make(name, **keys):
        layout = Layout.of(written(name).path)
        architecture = name.partition(":")[0]
        for key, value in keys.items():
            layout.put(f"{architecture}.{key.replace('__', '.')}", value)
        layout.write(tmp_path / "changed.gguf")
        return tmp_path / "changed.gguf"

    return make


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != SLOWEST])
def test_every_key_that_a_table_reads_has_its_type_and_range(written, name):
    file = GGUFFile.read(written(name).path)
    read = {key.removeprefix(f"{file.architecture}.") for key in settings_of(file)._metadata.used}
    assert read - DECLARED == set()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("dots1", "expert_used_count", scalar(UINT32, 5)),
        ("lfm2moe", "expert_used_count", scalar(UINT32, 0)),
        ("olmoe", "expert_used_count", scalar(FLOAT32, 2.0)),
        ("llama", "embedding_length", scalar(UINT32, 63)),
        ("lfm2", "embedding_length", scalar(UINT32, 2)),
        ("llama", "attention__head_count_kv", scalar(UINT32, 3)),
        ("llama", "attention__head_count_kv", scalar(UINT32, 0)),
        ("gemma2", "attention__sliding_window", scalar(UINT32, 0)),
        ("gpt-oss", "attention__sliding_window", scalar(UINT32, 0)),
        ("gpt-oss", "attention__sliding_window", None),
        ("cohere2", "attention__sliding_window", None),
        ("cohere2", "logit_scale", None),
        ("exaone-moe", "attention__sliding_window_pattern", array(FLOAT32, [2.0, 30.0, 1.0, 0.0])),
        ("exaone-moe", "attention__sliding_window_pattern", array(BOOL, [True, False])),
        ("stablelm", "use_parallel_residual", array(BOOL, [True])),
        ("dots1", "expert_weights_norm", scalar(UINT32, 1)),
        ("granite", "logit_scale", scalar(STRING, "2")),
        ("olmo", "attention__clamp_kqv", scalar(FLOAT32, -1.0)),
        # transformers' MPT has one slope in any case, and DBRX always a clamp.
        ("mpt", "attention__max_alibi_bias", scalar(FLOAT32, 4.0)),
        ("mpt", "attention__max_alibi_bias", None),
        ("dbrx", "attention__clamp_kqv", None),
        ("llama4", "attention__sliding_window", scalar(UINT32, 4096)),
        ("glm-dsa", "attention__indexer__types", array(BOOL, [False, True, True])),
        ("phimoe", "context_length", scalar(UINT32, 65_536)),
        ("mimo2", "attention__head_count_kv", array(UINT32, [2, 2, 2, 2])),
        ("mimo2", "attention__sliding_window_pattern", None),
        ("kimi-linear", "attention__head_count_kv", scalar(UINT32, 1)),
        ("laguna", "rope__dimension_count_swa", scalar(UINT32, 64)),
        ("granite_swa", "attention__sliding_window_pattern", None),
        ("granite_swa", "attention__rope_pattern", array(BOOL, [True, False])),
        ("cohere2moe", "expert_shared_feed_forward_length", scalar(UINT32, 32)),
        # As many as there are blocks, in llama.cpp too.
        *(("qwen35", "attention__recurrent_layers", array(BOOL, [True] * count)) for count in (2, 4)),
        ("qwen35", "ssm__time_step_rank", scalar(UINT32, 5)),
        ("qwen35", "ssm__group_count", scalar(UINT32, 4)),
        ("qwen35", "ssm__inner_size", scalar(UINT32, 100)),
        ("qwen35", "rope__dimension_sections", array(UINT32, [1, 1, 1, 1])),
        ("bailingmoe3", "swiglu_clamp_exp", array(FLOAT32, [0.0, 7.0, 7.0])),
        ("bailingmoe3", "swiglu_clamp_shexp", array(FLOAT32, [7.0] * 3)),
        ("hy_v4", "swiglu_clamp_exp", None),
        ("hy_v4", "swiglu_clamp_exp", array(FLOAT32, [0.0] * 3)),
        ("hy_v4", "attention__indexer__types", array(BOOL, [False, True, True])),
        ("hy_v4", "attention__indexer__top_k", None),
        ("deepseek4", "attention__compress_ratios", array(UINT32, [0, 4, 64, 4])),
        ("deepseek4", "swiglu_clamp_shexp", array(FLOAT32, [0.5] * 4)),
        ("deepseek4", "attention__indexer__key_length", scalar(UINT32, 4)),
        ("minimax-m3", "attention__indexer__head_count", scalar(UINT32, 4)),
        ("dots3note", "attention__indexer__types", array(BOOL, [True] * 4)),
        ("dots3note", "attention__head_count", array(UINT32, [4, 2, 2, 2])),
        ("hrm_text", "hrm__prefix_lm", scalar(BOOL, True)),
        ("hrm_text", "hrm__h_cycles", scalar(UINT32, 3)),
        ("qwen4exp", "attention__compress_ratios", array(UINT32, [0, 0, 0])),
        ("qwen4exp", "attention__indexer__top_k", scalar(UINT32, 14)),
        ("qwen4exp", "attention__indexer__key_length", scalar(UINT32, 4)),
        ("qwen4exp", "ple__layers", array(UINT32, [2])),
        ("qwen4exp", "ple__layer_multipliers", array(UINT64, [1, 1, 1 << 56])),
        ("qwen4exp", "ple__head_offsets", array(UINT64, [0, 0, 0, 1000])),
        ("qwen4exp", "ple__head_vocab_sizes", array(UINT64, [300, 300, 0])),
        ("qwen4exp", "ple__eos_token_id", scalar(UINT32, 263)),
        # All layers, more than all, and one that is no predictor.
        *(("glm4moe", "nextn_predict_layers", scalar(UINT32, count)) for count in (3, 4, 1)),
        ("nemotron_h_moe", "nextn_predict_layers", scalar(UINT32, 99)),
    ],
)  # fmt: skip
def test_a_value_that_no_model_has_is_refused_by_its_key(changed, name, key, value):
    path = changed(name, **{key: value})
    with pytest.raises(ModelError, match=re.escape(key.replace("__", "."))) as error:
        load_model(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "key", "value", "tensor"),
    [
        ("llama", "attention__head_count", 8, "blk.0.attn_q.weight"),
        ("qwen35moe", "ssm__state_size", 8, "blk.0.ssm_conv1d.weight"),
        ("qwen3moe", "expert_feed_forward_length", 64, "blk.0.ffn_"),
        ("qwen3moe", "expert_count", 8, "blk.0.ffn_"),
        ("kimi-linear", "kda__head_dim", 32, "blk.0.attn_q.weight"),
        ("glm-dsa", "attention__indexer__head_count", 8, "blk.0.indexer."),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_the_keys_that_say_its_shape(changed, name, key, value, tensor):
    path = changed(name, **{key: scalar(UINT32, value)})
    with pytest.raises(ModelError) as error:
        load_model(path)
    for part in (tensor, str(path), f"{name}.{key.replace('__', '.')} {value}"):
        assert part in str(error.value)


def test_a_file_of_hrm_without_one_of_its_blocks_is_refused(written, tmp_path):
    layout = Layout.of(written("hrm_text").path)
    layout.tensors = [tensor for tensor in layout.tensors if not tensor.name.startswith("blk.3.")]
    layout.move_together()
    layout.write(tmp_path / "part.gguf")
    with pytest.raises(ModelError, match=r"block_count is 12, and the file has tensors of 3 blocks, 0 to 2"):
        load_model(tmp_path / "part.gguf")


def test_windows_that_a_file_leaves_out_are_those_that_llama_cpp_takes(changed):
    assert configuration_of(GGUFFile.read(changed("gemma2", attention__sliding_window=None))).sliding_window == 4096
    gemma3 = configuration_of(GGUFFile.read(changed("gemma3", attention__sliding_window=None)))
    assert set(gemma3.layer_types) == {"full_attention"}


@pytest.mark.parametrize("gone", ["attention__sliding_window", "attention__sliding_window_pattern"])
def test_an_exaone_4_without_windows_rotates_all_layers(written, changed, gone):
    found = load_model(changed("exaone4", **{gone: None}), dtype="float32", device="cpu").model(IDS).logits
    original = written("exaone4").original
    config = type(original.config).from_dict(
        original.config.to_dict() | {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    )
    expected = type(original)(config).eval()
    expected.load_state_dict(original.state_dict())
    assert float(relative_error(found, expected(IDS).logits).max()) < TOLERANCE


def test_a_file_that_names_its_kind_and_no_architecture_is_refused_by_its_kind(written, tmp_path):
    layout = Layout.of(written("llama").path)
    layout.put("general.architecture", None)
    layout.put("general.type", scalar(STRING, "imatrix"))
    layout.write(tmp_path / "weighted.gguf")
    with pytest.raises(ModelError, match=r"weighted\.gguf' has no general\.architecture.*\.type 'imatrix': give"):
        load_model(tmp_path / "weighted.gguf")


def test_two_scalings_by_tensors_in_one_file_are_refused(written, tmp_path):
    layout = Layout.of(written("phi3: long rotation").path)
    layout.add("rope_freqs.weight", [8], [1.0] * 8)
    layout.write(tmp_path / "two.gguf")
    with pytest.raises(
        ModelError, match=r"two RoPE scalings, the tensors rope_freqs\.weight and rope_factors_long\.weight"
    ):
        load_model(tmp_path / "two.gguf")


def test_a_parameter_without_one_of_its_parts_is_named(written, tmp_path):
    layout = Layout.of(written("deepseek2").path)
    layout.tensors = [tensor for tensor in layout.tensors if tensor.name != "blk.1.attn_v_b.weight"]
    layout.move_together()
    layout.write(tmp_path / "part.gguf")
    with pytest.raises(ModelError, match=r"no weights for 1 parameters .*layers\.1\.self_attn\.kv_b_proj\.weight"):
        load_model(tmp_path / "part.gguf")


def test_a_file_of_solar_open_that_rotates_half_a_head_is_refused(written, tmp_path):
    layout = Layout.of(written("glm4moe").path)
    key = "tokenizer.ggml.pre"
    layout.entries = [(name, scalar(STRING, "solar-open") if name == key else value) for name, value in layout.entries]
    layout.write(tmp_path / "solar.gguf")
    with pytest.raises(ModelError, match=r"glm4moe\.rope\.dimension_count 16.*Solar Open"):
        load_model(tmp_path / "solar.gguf")


def test_a_stablelm_of_a_longer_context_says_the_base_of_its_rotation(written, changed):
    with pytest.raises(ModelError, match=r"stablelm\.rope\.freq_base None.*16,384 tokens"):
        load_model(changed("stablelm", context_length=scalar(UINT32, 16_384)))
    said = changed("stablelm", context_length=scalar(UINT32, 16_384), rope__freq_base=scalar(FLOAT32, 1e4))
    found = load_model(said, dtype="float32", device="cpu").model(IDS).logits
    assert float(relative_error(found, written("stablelm").original(IDS).logits).max()) < TOLERANCE


def test_a_bitnet_of_another_vocabulary_than_the_first_is_refused(written, tmp_path):
    layout, key = Layout.of(written("bitnet").path), "tokenizer.ggml.model"
    layout.entries = [(name, scalar(STRING, "gpt2") if name == key else value) for name, value in layout.entries]
    layout.write(tmp_path / "bitnet.gguf")
    with pytest.raises(ModelError, match=r"bitnet\.gguf' has tokenizer\.ggml\.model 'gpt2'.*gguf_path"):
        load_model(tmp_path / "bitnet.gguf")
