"""Fidelity: methods against the untouched model's continuation, on texts without labels."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject, inject
from hetero_kv.errors import ConfigError
from hetero_kv.evals import ConfiguredModel, RunOptions, config_specs, run
from hetero_kv.evals.shared_prefill import record_prefill
from hetero_kv.evals.teacher_forcing import force, full_attention_continuation
from tests.support.tiny_evaluation import SPARSE, tiny_loaded

pytestmark = pytest.mark.usefixtures("no_plots")

QUESTION = "".join(f"Fact {n}: {n * 37 % 101} is the number of {chr(65 + n % 26)}. " for n in range(12))


@pytest.fixture(scope="module")
def loaded():
    return tiny_loaded()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "facts.txt").write_text(QUESTION)
    (folder / "other.md").write_text(QUESTION[::-1])
    return folder / "facts.txt", folder / "other.md"


@pytest.fixture(scope="module")
def done(loaded, files, tmp_path_factory, no_plots):
    configs = config_specs(["dense:top_k_blocks=all", "quest", "streaming"])
    options = RunOptions(prompt_files=files, max_new_tokens=12)
    return run(["fidelity"], ConfiguredModel(loaded, configs, settings=SPARSE), tmp_path_factory.mktemp("out"), options)


def of_method(done, method):
    return [result for result in done.results if result.method == method]


def test_each_file_is_one_prompt_whole(done):
    assert [(result.sample, result.length) for result in of_method(done, "full")] == [
        ("fidelity/facts.txt", len(QUESTION)),
        ("fidelity/other.md", len(QUESTION)),
    ]
    # The chat template of the tiny model is four tokens around a question.
    assert [result.cost.prompt_tokens for result in done.results] == [len(QUESTION) + 3] * 8


@pytest.mark.parametrize("times", [1, 1000])
def test_a_file_that_cannot_fit_is_refused_by_name_before_anything_is_done(loaded, files, tmp_path, times, monkeypatch):
    (tmp_path / "long.txt").write_text(QUESTION * times)
    model = ConfiguredModel(loaded, config_specs(["quest"]), settings={**SPARSE, "max_seq_len": 300})
    encoded = []
    encode = model.turns._encoder.encode
    monkeypatch.setattr(model.turns._encoder, "encode", lambda pieces: encoded.extend(pieces) or encode(pieces))
    needed = {1: f"takes {len(QUESTION) + 3 + 12} tokens with its", 1000: f"has {1000 * len(QUESTION):,} characters"}
    options = RunOptions(prompt_files=(tmp_path / "long.txt",), max_new_tokens=12)
    with pytest.raises(ConfigError, match=rf"prompt_file 'long\.txt' cannot be used: it {needed[times]}.* is 300; "):
        run(["fidelity"], model, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    # What has more characters than there can be is not even encoded.
    assert (max(len(piece.content) for piece in encoded) >= len(QUESTION)) == (times == 1)


def test_full_attention_through_blocks_is_faithful(done):
    for result in of_method(done, "dense:top_k_blocks=all"):
        assert result.score == result.parts["top_1_agreement"] == 1
        assert result.parts["kl_divergence"] == pytest.approx(0, abs=1e-8)
        assert result.details["block_recall"] == pytest.approx([1] * 3, abs=1e-5)
        assert result.details["steps"] == 11


def test_a_method_that_sees_less_is_less_faithful(done):
    quest, streaming = (done.summary["tasks"]["fidelity"][method]["parts"] for method in ("quest", "streaming"))
    assert quest["kl_divergence"] > 1e-4
    assert streaming["block_recall"] < quest["block_recall"] < 1


def test_the_figures_are_those_of_forcing_by_hand(loaded, done):
    prompt = loaded.tokenizer(f"<|user|>{QUESTION}<|end|><|assistant|>", return_tensors="pt")["input_ids"]
    # All of the turn is the question, but for the token that opens it.
    recording = record_prefill(loaded.model, prompt, question=prompt.shape[1] - 1)
    continuation = full_attention_continuation(loaded.model, recording, 12, {0})
    inject(loaded.model, "streaming", command_line={**SPARSE, "max_seq_len": 1000, "measure_recall": True})
    try:
        expected = force(loaded.model, recording.cache_for(loaded.model), continuation)
    finally:
        eject(loaded.model)
    result = of_method(done, "streaming")[0]
    assert result.parts["top_1_agreement"] == expected.agreement
    assert result.parts["kl_divergence"] == pytest.approx(expected.mean_divergence, rel=1e-3)
    assert result.details["block_recall"] == pytest.approx(expected.recall, rel=1e-4)


def test_the_untouched_model_agrees_with_itself_and_its_continuation_is_kept(loaded, done):
    result = of_method(done, "full")[0]
    prompt = loaded.tokenizer(f"<|user|>{QUESTION}<|end|><|assistant|>", return_tensors="pt")["input_ids"]
    output = loaded.model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    assert result.predictions == (loaded.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True),)
    assert (result.score, result.parts["kl_divergence"]) == (1, 0)


def test_an_answer_that_ends_at_once_is_gone_on_with(loaded, files, tmp_path):
    model = ConfiguredModel(loaded, config_specs(["dense:top_k_blocks=all"]), settings=SPARSE)
    model.ends = frozenset(range(loaded.model.config.vocab_size))
    done = run(["fidelity"], model, tmp_path, RunOptions(prompt_files=files[:1], max_new_tokens=5))
    assert of_method(done, "dense:top_k_blocks=all")[0].details["steps"] == 4


def test_without_files_passages_of_the_haystack_are_gone_on_with(loaded, files, tmp_path):
    model = ConfiguredModel(loaded, config_specs(["dense:top_k_blocks=all"]), settings=SPARSE)
    options = RunOptions(lengths=(100, 200), haystack=files[0], max_new_tokens=4)
    done = run(["fidelity"], model, tmp_path, options)
    assert [result.sample for result in of_method(done, "full")] == ["fidelity/100/0", "fidelity/200/0"]
    assert [result.cost.prompt_tokens for result in of_method(done, "full")] == [100, 200]


def test_methods_are_compared_with_the_baseline_even_when_it_is_left_out(loaded, files, tmp_path, done):
    model = ConfiguredModel(loaded, config_specs(["streaming"]), settings=SPARSE, baseline=False)
    alone = run(["fidelity"], model, tmp_path, RunOptions(prompt_files=files, max_new_tokens=12))
    assert [result.parts for result in alone.results] == [result.parts for result in of_method(done, "streaming")]


def test_without_recall_the_scores_are_the_same_and_speeds_can_be_read(loaded, files, done, tmp_path):
    options = RunOptions(prompt_files=files, max_new_tokens=12)
    model = ConfiguredModel(loaded, config_specs(["quest"]), settings=SPARSE, measure_recall=False)
    found = run(["fidelity"], model, tmp_path / "out", options)
    for with_it, without in zip(of_method(done, "quest"), of_method(found, "quest"), strict=True):
        assert without.score == with_it.score
        assert without.parts == {name: with_it.parts[name] for name in ("top_1_agreement", "kl_divergence")}
        assert "block_recall" not in without.details
        assert with_it.cost.tokens_per_s is None
        assert without.cost.tokens_per_s == pytest.approx(11 / without.cost.decode_s)
