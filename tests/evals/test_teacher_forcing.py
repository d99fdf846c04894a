"""Fidelity: full attention's answer, forced through a method and compared step by step."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroKVError, eject, inject
from hetero_kv.evals.generation import greedy
from hetero_kv.evals.shared_prefill import record_prefill
from hetero_kv.evals.teacher_forcing import Continuation, Fidelity, force, full_attention_continuation
from tests.support.tiny_models import tiny_model

SMALL = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "max_seq_len": 256, "kv_type": "FP32"}
PROMPT = torch.randint(2, 97, (1, 90), generator=torch.Generator().manual_seed(0))
STEPS = 25


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", num_hidden_layers=4)


@pytest.fixture(autouse=True)
def ejected(llama):
    yield
    if getattr(llama, "hetero_kv_injection", None) is not None:
        eject(llama)


def fidelity(model, recipe, **settings):
    recording = record_prefill(model, PROMPT)
    inject(model, recipe, command_line={**SMALL, **settings})
    continuation = full_attention_continuation(model, recording, STEPS)
    return force(model, recording.cache_for(model), continuation), continuation


def test_the_continuation_is_what_the_untouched_model_generates(llama):
    expected = llama.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=STEPS, do_sample=False)
    recording = record_prefill(llama, PROMPT)
    inject(llama, "streaming", command_line=SMALL)
    continuation = full_attention_continuation(llama, recording, STEPS)
    assert list(continuation.tokens) == expected[0, PROMPT.shape[1] :].tolist()
    assert continuation.logits.argmax(dim=1).tolist() == list(continuation.tokens[1:])


def test_the_continuation_ends_with_an_end_token(llama):
    recording = record_prefill(llama, PROMPT)
    whole = full_attention_continuation(llama, recording, STEPS).tokens
    end = whole[6]
    cut = full_attention_continuation(llama, recording, STEPS, end_tokens={end})
    assert cut.tokens == whole[: whole.index(end) + 1]
    assert len(cut.logits) == len(cut.tokens) - 1


def test_full_attention_through_the_engine_is_faithful_to_itself(llama):
    measured, _ = fidelity(llama, "dense", measure_recall=True)
    assert measured.agreement == 1
    assert measured.mean_divergence == pytest.approx(0, abs=1e-8)
    assert measured.mean_recall() == pytest.approx(1, abs=1e-5)
    assert len(measured.agrees) == len(measured.divergence) == STEPS - 1


def test_agreement_and_divergence_are_those_of_the_methods_own_logits(llama):
    measured, continuation = fidelity(llama, "streaming")
    cache = record_prefill(llama, PROMPT).cache_for(llama)
    with torch.no_grad():
        logits = [llama(torch.tensor([[t]]), past_key_values=cache).logits[0, -1] for t in continuation.tokens[:-1]]
    full = torch.distributions.Categorical(logits=continuation.logits)
    method = torch.distributions.Categorical(logits=torch.stack(logits))
    assert list(measured.agrees) == (torch.stack(logits).argmax(1) == continuation.logits.argmax(1)).tolist()
    assert measured.divergence == pytest.approx(torch.distributions.kl_divergence(full, method).tolist(), rel=1e-4)
    assert 0 < measured.agreement < 1
    assert measured.mean_divergence > 0.01


def test_recall_is_reported_per_layer_and_only_when_measured(llama):
    measured, _ = fidelity(llama, "ktransformers", top_k_blocks=2, dense_layer_num=2, measure_recall=True)
    assert measured.recall[:2] == pytest.approx((1, 1), abs=1e-5)
    assert all(recall < 0.999 for recall in measured.recall[2:])
    assert measured.mean_recall(2) == pytest.approx(sum(measured.recall[2:]) / 2)
    eject(llama)
    assert fidelity(llama, "ktransformers", top_k_blocks=2)[0].mean_recall() is None


def test_a_method_that_agrees_everywhere_generates_the_same_answer(llama):
    recording = record_prefill(llama, PROMPT)
    expected = full_attention_continuation(llama, recording, STEPS).tokens
    inject(llama, "dense", command_line=SMALL)
    ended = frozenset({expected[3]})
    assert tuple(greedy(llama, recording.cache_for(llama), recording.logits, STEPS, frozenset()).tokens) == expected
    assert tuple(greedy(llama, recording.cache_for(llama), recording.logits, STEPS, ended).tokens) == expected[:4]


def test_the_untouched_model_can_be_forced_too(llama):
    recording = record_prefill(llama, PROMPT)
    continuation = full_attention_continuation(llama, recording, STEPS)
    measured = force(llama, recording.untouched_cache(llama), continuation)
    assert measured == Fidelity((True,) * (STEPS - 1), (0.0,) * (STEPS - 1), (None,) * 4)


def test_too_short_a_continuation_is_refused(llama):
    recording = record_prefill(llama, PROMPT)
    with pytest.raises(HeteroKVError, match="max_new_tokens is 1"):
        full_attention_continuation(llama, recording, 1)
    with pytest.raises(HeteroKVError, match="single token"):
        force(llama, recording.untouched_cache(llama), Continuation((5,), torch.empty(0, 97)))
