"""Streaming perplexity: the likelihood of every decoded token by position."""

from __future__ import annotations

import math

import pytest
import torch

from hetero_kv import HeteroKVError
from hetero_kv.evals import ConfiguredModel, RunOptions, config_specs, run
from hetero_kv.evals.logits_task import LogitsTaskRequest, PromptFile
from hetero_kv.evals.perplexity import Perplexity
from tests.support.tiny_evaluation import SPARSE, tiny_loaded

pytestmark = pytest.mark.usefixtures("no_plots")

TEXT = "".join(f"Line {n}: the {n * n}th word. " for n in range(200))
PREFILL = 80


@pytest.fixture(scope="module")
def loaded():
    return tiny_loaded()


@pytest.fixture(scope="module")
def done(loaded, tmp_path_factory, no_plots):
    """A run over two lengths of a file: by full attention, by the same through blocks, and by less."""
    folder = tmp_path_factory.mktemp("perplexity")
    (folder / "text.txt").write_text(TEXT)
    options = RunOptions(
        lengths=(100, 150), samples=2, prompt_files=(folder / "text.txt",), prefill_tokens=PREFILL, seed=3
    )
    configs = config_specs(["dense:top_k_blocks=all", "streaming"])
    return run(["perplexity"], ConfiguredModel(loaded, configs, settings=SPARSE), folder / "out", options)


def results(done, method):
    return {result.sample: result for result in done.results if result.method == method}


def asked_text(done, result):
    """The passage of a sample, found again by the run's own rules."""
    import random

    length, number = map(int, result.sample.split("/")[2:])
    start = random.Random(f"3 text.txt {length} {number}").randrange(len(TEXT) - length + 1)
    return TEXT[start : start + length]


@torch.no_grad()
def test_the_untouched_models_likelihoods_are_transformers_own(loaded, done):
    for sample, result in results(done, "full").items():
        ids = loaded.tokenizer(asked_text(done, result), return_tensors="pt")["input_ids"]
        nll = torch.nn.functional.cross_entropy(loaded.model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        decoded = nll[PREFILL - 1 :]
        assert result.parts["nll"] == pytest.approx(decoded.mean().item(), rel=1e-5), sample
        assert result.parts["perplexity"] == pytest.approx(math.exp(result.parts["nll"]))
        assert result.score == pytest.approx(1 / result.parts["perplexity"])


def test_full_attention_decoded_token_by_token_gives_the_same_likelihoods(done):
    full, dense = results(done, "full"), results(done, "dense:top_k_blocks=all")
    assert full.keys() == dense.keys()
    for sample in full:
        assert dense[sample].details["curve"]["position"] == full[sample].details["curve"]["position"]
        assert dense[sample].details["curve"]["nll"] == pytest.approx(full[sample].details["curve"]["nll"], abs=1e-4)


def test_a_method_that_sees_less_foretells_otherwise(done):
    full, streaming = results(done, "full"), results(done, "streaming")
    assert all(abs(streaming[sample].parts["nll"] - full[sample].parts["nll"]) > 1e-3 for sample in full)


def test_the_curve_runs_from_the_prefilled_tokens_to_the_texts_end(done):
    for result in done.results:
        curve = result.details["curve"]
        assert curve["position"][-1] == result.length
        assert curve["position"][0] > PREFILL
        assert curve["position"] == sorted(curve["position"])
        assert len(curve["position"]) == len(curve["nll"]) == min(64, result.length - PREFILL)


def test_all_stretches_of_a_curve_together_are_the_mean(loaded, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = RunOptions(lengths=(128,), prompt_files=(tmp_path / "text.txt",), prefill_tokens=64)
    run_ = run(["perplexity"], ConfiguredModel(loaded, []), tmp_path / "out", options)
    (result,) = run_.results
    # 64 tokens in 64 stretches of one.
    assert math.fsum(result.details["curve"]["nll"]) / 64 == pytest.approx(result.parts["nll"])


def test_the_summary_averages_the_curves_of_a_length(done):
    curves = done.summary["tasks"]["perplexity"]["streaming"]["curves"]
    of_length = [r.details["curve"]["nll"] for r in results(done, "streaming").values() if r.length == 150]
    assert list(curves) == ["100", "150"]
    assert curves["150"]["nll"] == pytest.approx([sum(pair) / 2 for pair in zip(*of_length, strict=True)])


def test_a_text_that_is_shorter_than_a_length_is_refused(loaded, tmp_path):
    (tmp_path / "text.txt").write_text("short")
    options = RunOptions(lengths=(150,), prompt_files=(tmp_path / "text.txt",))
    with pytest.raises(HeteroKVError, match=r"text.txt has 5 tokens, which is less than a length of 150"):
        run(["perplexity"], ConfiguredModel(loaded, []), tmp_path / "out", options)


@pytest.mark.parametrize(("length", "prefilled"), [(150, 75), (4096, 1024)])
def test_by_default_half_of_a_short_text_is_prefilled(length, prefilled):
    text = "word " * length
    request = LogitsTaskRequest(
        lengths=(length,),
        depths=(),
        samples=1,
        seed=0,
        haystack=None,
        count_tokens=len,
        encode=str.split,
        decode=" ".join,
        prompt_files=(PromptFile("text.txt", text),),
    )
    (sample,) = Perplexity().samples(request)
    assert sample.metadata["prefill_tokens"] == prefilled


def test_a_text_that_would_be_prefilled_to_its_end_is_refused(loaded, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = RunOptions(lengths=(150,), prompt_files=(tmp_path / "text.txt",), prefill_tokens=143)
    with pytest.raises(HeteroKVError, match=r"prefill_tokens is 143, .* of 150 tokens to feed; give 142 or fewer"):
        run(["perplexity"], ConfiguredModel(loaded, []), tmp_path / "out", options)


def test_a_haystack_is_a_text_too(loaded, tmp_path):
    (tmp_path / "essay.txt").write_text(TEXT)
    options = RunOptions(lengths=(150,), haystack=tmp_path / "essay.txt")
    done = run(["perplexity"], ConfiguredModel(loaded, []), tmp_path / "out", options)
    assert [result.sample for result in done.results] == ["perplexity/150/0"]
