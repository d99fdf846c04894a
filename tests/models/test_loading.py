"""`load_model` with a tiny random model in every form and with the small real one."""

from __future__ import annotations

import json
import shutil

import gguf
import pytest
import torch
import transformers

from hetero_kv.models import ModelError, load_model, model_config, open_model
from hetero_kv.models.turns import end_of_turn_ids
from tests.support.tiny_qwen2 import END_OF_TEXT, END_OF_TURN

PROMPT = torch.arange(40)[None]


def logits(loaded):
    with torch.inference_mode():
        return loaded.model(PROMPT).logits


@pytest.fixture(scope="module")
def from_directory(tiny_directory):
    return load_model(tiny_directory, dtype="float32", device="cpu")


def test_a_directory_loads_in_eval_mode_with_its_limits(from_directory, tiny_directory):
    assert from_directory.name == tiny_directory.name
    assert from_directory.context_length == 512
    assert not from_directory.model.training
    assert from_directory.model.dtype == torch.float32


def test_a_gguf_file_gives_the_same_logits_as_the_directory(from_directory, tiny_gguf):
    torch.testing.assert_close(logits(load_model(tiny_gguf, dtype="float32", device="cpu")), logits(from_directory))


def test_weights_from_a_gguf_file_with_the_directorys_tokenizer_give_the_same_logits(
    from_directory, tiny_directory, tiny_gguf
):
    loaded = load_model(tiny_directory, gguf_path=tiny_gguf, dtype="float32", device="cpu")
    assert loaded.name == tiny_directory.name
    torch.testing.assert_close(logits(loaded), logits(from_directory))


def test_an_output_matrix_in_the_file_is_used_though_the_configuration_ties_it(
    from_directory, tiny_directory, tiny_gguf, tmp_path
):
    directory = shutil.copytree(tiny_directory, tmp_path / "tied")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    loaded = load_model(directory, gguf_path=tiny_gguf, dtype="float32", device="cpu")
    torch.testing.assert_close(logits(loaded), logits(from_directory))


def test_an_output_matrix_that_the_file_lacks_is_the_embedding_though_the_configuration_has_two(
    tiny_directory, write_tiny_gguf, tmp_path
):
    tied = write_tiny_gguf(tmp_path / "tied.gguf", without=("output.weight",))
    model = load_model(tiny_directory, gguf_path=tied, dtype="float32", device="cpu").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokenizer_and_chat_template_come_from_the_gguf_file(tiny_gguf, from_directory):
    tokenizer = load_model(tiny_gguf, dtype="float32", device="cpu").tokenizer
    chat = [{"role": "user", "content": "hello there"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text).input_ids == from_directory.tokenizer(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_token_that_ends_a_turn_ends_the_generation(tiny_gguf, from_directory):
    for loaded in (from_directory, load_model(tiny_gguf, dtype="float32", device="cpu")):
        assert loaded.model.generation_config.eos_token_id == [END_OF_TEXT, END_OF_TURN]
        assert loaded.model.generation_config.pad_token_id == END_OF_TEXT


def test_the_end_of_a_turn_is_read_from_the_chat_template(from_directory):
    tokenizer = from_directory.tokenizer
    assert end_of_turn_ids(tokenizer) == {END_OF_TURN}
    without_answer = "<|im_start|>{{ messages[0].content }}"
    for template in (
        None,
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
        without_answer,
    ):
        changed = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
        changed.chat_template = template
        assert end_of_turn_ids(changed) == set()


def test_the_files_own_end_of_turn_is_used_without_a_chat_template(write_tiny_gguf, tmp_path):
    path = write_tiny_gguf(tmp_path / "plain.gguf", lambda writer: writer.add_eot_token_id(7))
    assert 7 in load_model(path, dtype="float32", device="cpu").model.generation_config.eos_token_id


def test_weights_take_the_requested_dtype(tiny_directory, tiny_gguf):
    for source in (tiny_directory, tiny_gguf):
        assert load_model(source, dtype="bf16", device="cpu").model.dtype == torch.bfloat16


def test_a_configuration_is_read_without_weights(tiny_directory, write_tiny_gguf, tmp_path):
    only_config = tmp_path / "only"
    only_config.mkdir()
    shutil.copy(tiny_directory / "config.json", only_config)
    names = ("num_hidden_layers", "num_key_value_heads", "hidden_size", "max_position_embeddings", "vocab_size")
    expected = [getattr(transformers.AutoConfig.from_pretrained(tiny_directory), name) for name in names]
    for source in (only_config, write_tiny_gguf(tmp_path / "tiny.gguf")):
        assert [getattr(model_config(source), name) for name in names] == expected


def test_loading_leaves_the_libraries_as_they_were(tiny_gguf):
    verbosity = transformers.logging.get_verbosity()
    load_model(tiny_gguf, dtype="float32", device="cpu")
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.logging.is_progress_bar_enabled()


def test_loading_writes_nothing_to_the_terminal_and_reports_to_the_caller(tiny_gguf, capfd):
    told = []
    load_model(tiny_gguf, dtype="float32", device="cpu", progress=lambda *step: told.append(step))
    assert capfd.readouterr() == ("", "")
    activity, done, total = told[-1]
    assert (activity, done) == ("reading weights", total)


def test_missing_weights_are_named(write_tiny_gguf, tmp_path):
    path = write_tiny_gguf(tmp_path / "gap.gguf", without=("blk.1.attn_q.weight",))
    with pytest.raises(
        ModelError, match=r"no weights for 1 parameters of Qwen2ForCausalLM \(model\.layers\.1\.self_attn"
    ):
        load_model(path, dtype="float32", device="cpu")


def test_weights_of_another_model_than_the_configurations_are_refused(tiny_directory, tiny_gguf, tmp_path):
    directory = shutil.copytree(tiny_directory, tmp_path / "wider")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ModelError, match=r"tiny\.gguf' has intermediate_size 64 .* and the configuration 128; give"):
        load_model(directory, gguf_path=tiny_gguf, dtype="float32", device="cpu")


def test_a_rotation_that_a_file_says_is_computed_and_one_that_the_configuration_denies_is_refused(
    tiny_directory, write_tiny_gguf, tmp_path
):
    def stretch(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)

    path = write_tiny_gguf(tmp_path / "yarn.gguf", stretch)
    rope = load_model(path, dtype="float32", device="cpu").model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 512)
    with pytest.raises(ModelError, match=r"has rope_parameters .*'yarn'.* and the configuration .*'default'"):
        load_model(tiny_directory, gguf_path=path, dtype="float32", device="cpu")


def test_an_architecture_without_a_table_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "rwkv7")
    writer.add_tensor("weight", torch.zeros(32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for load in (load_model, open_model):
        with pytest.raises(
            ModelError, match=r"odd\.gguf' has the GGUF architecture 'rwkv7', which transformers has no class for"
        ):
            load(tmp_path / "odd.gguf", dtype="float32", device="cpu")


def test_damaged_weights_in_a_directory_are_refused(tiny_directory, tmp_path):
    directory = shutil.copytree(tiny_directory, tmp_path / "damaged")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"damaged cannot be loaded from '.*damaged'"):
        load_model(directory, dtype="float32", device="cpu")


def test_a_configuration_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        model_config(tmp_path)


def test_a_models_own_code_runs_only_when_the_user_says_so(tiny_directory, tmp_path, capfd):
    directory = shutil.copytree(tiny_directory, tmp_path / "own_code")
    config = json.loads((directory / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (directory / "config.json").write_text(json.dumps(config | own))
    (directory / "own.py").write_text("raise SystemExit('the model ran its own code')")
    with pytest.raises(ModelError, match="own_code includes Python code, which runs only with your consent"):
        load_model(directory, dtype="float32", device="cpu")
    with pytest.raises(SystemExit, match="the model ran its own code"):
        load_model(directory, dtype="float32", device="cpu", trust_remote_code=True)


@pytest.mark.model
def test_the_small_named_model_answers_and_ends_its_turn(smollm2):
    assert smollm2.name == "smollm2-135m-instruct"
    assert smollm2.context_length == 8192
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = smollm2.model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert smollm2.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
