"""Prompts that depart from earlier ones go on from checkpoints, where layers do not keep every token."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from hetero_kv import Engine, HeteroCache, SamplingParams, inject
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.loading import LoadedModel
from hetero_kv.serving import checkpoints
from hetero_kv.serving.checkpoints import TAIL
from tests.serving.number_tokenizer import Numbers
from tests.serving.tiny_engine import GREEDY, alone, engine_of
from tests.support.ragged_rows import prompt
from tests.support.slow_variants import with_few, with_slow
from tests.support.small_families import mixed, operator_in
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import HYBRIDS, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

#: Recurrent states of every kind, and sliding windows.
STATEFUL = [*HYBRIDS, "gemma2", "gemma3_text", "gpt_oss"]
ALIKE = [name for name in STATEFUL if name not in ("lfm2", "qwen3_5_text", "gemma3_text")]
DOCUMENT, QUESTION, OTHER, THIRD = (
    prompt(length, seed).tolist() for seed, length in enumerate((200, 21, 30, 70), start=40)
)


@pytest.mark.parametrize("architecture", with_slow(STATEFUL, slow=[*ALIKE, "lfm2"]))
def test_a_second_question_to_a_document_goes_on_from_the_documents_end(architecture):
    with engine_of("dense", architecture) as engine:
        engine.generate([*DOCUMENT, *QUESTION], GREEDY, question=len(QUESTION)).result()
        found = engine.generate([*DOCUMENT, *OTHER], GREEDY, question=len(OTHER)).result()
        assert (found.cached_tokens, found.reuse.reason) == (len(DOCUMENT), "differs")
        assert found.tokens == alone(engine, [*DOCUMENT, *OTHER])
        # The first conversation goes on as if the second had never been.
        again = engine.generate([*DOCUMENT, *QUESTION, *OTHER], GREEDY).result()
        assert again.tokens == alone(engine, [*DOCUMENT, *QUESTION, *OTHER])


@pytest.mark.parametrize("architecture", with_few(STATEFUL, ("qwen3_5_text",)))
def test_a_turn_whose_history_lost_its_thoughts_goes_on_from_before_the_answer(architecture):
    """The template's beginning of an answer, which the next prompt has not, is 4 tokens."""
    start = [3, 4, 5, 6]
    with engine_of("dense", architecture) as engine:
        first = engine.generate([*DOCUMENT, *start], GREEDY).result()
        following = [*DOCUMENT, *first.tokens[6:], *QUESTION]
        found = engine.generate(following, GREEDY).result()
        assert found.cached_tokens == len(DOCUMENT) + len(start) - TAIL
        assert (found.reuse.reason, found.reuse.common) == ("cannot_go_back", len(DOCUMENT))
        assert "cannot roll back" in found.reuse.text
        assert found.tokens == alone(engine, following)


def test_a_third_prompt_goes_on_from_where_the_first_two_parted():
    """A system prompt that no request names."""
    with engine_of("dense", "lfm2") as engine:
        found = [engine.generate([*DOCUMENT, *tail], GREEDY).result() for tail in (QUESTION, OTHER, THIRD)]
        assert [each.cached_tokens for each in found] == [0, 0, len(DOCUMENT)]
        assert [each.reuse.reason for each in found] == ["nothing_kept", "cannot_go_back", "differs"]
        assert found[2].tokens == alone(engine, [*DOCUMENT, *THIRD])


@pytest.mark.parametrize("architecture", with_few(["gemma3_text", "lfm2"]))
def test_a_prompt_that_departs_within_a_document_goes_on_from_the_last_part_before(architecture, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 32)
    with engine_of("dense", architecture, part=40) as engine:
        engine.generate(DOCUMENT, GREEDY).result()
        branch = [*DOCUMENT[:130], *THIRD]
        found = engine.generate(branch, GREEDY).result()
        assert found.cached_tokens == 120
        assert found.tokens == alone(engine, branch)


def test_prompts_that_pass_beside_others_tokens_leave_checkpoints_too():
    with engine_of("dense", "lfm2", longest_gap_s=1e-6) as engine:
        other = engine.generate(THIRD, SamplingParams(max_new_tokens=90, ignore_eos=True))
        for _ in range(6):
            engine.step()
        first = engine.generate([*DOCUMENT, *QUESTION], GREEDY, question=len(QUESTION))
        first.result()
        found = engine.generate([*DOCUMENT, *OTHER], GREEDY).result()
        assert found.cached_tokens == len(DOCUMENT)
        assert found.tokens == alone(engine, [*DOCUMENT, *OTHER])
        assert other.result().tokens == alone(engine, THIRD, 90)


def test_a_request_that_is_being_answered_shares_its_checkpoints():
    with engine_of("dense", "lfm2") as engine:
        first = engine.generate([*DOCUMENT, *QUESTION], GREEDY, question=len(QUESTION))
        for _ in range(5):
            engine.step()
        assert not first.is_done
        second = engine.generate([*DOCUMENT, *OTHER], GREEDY)
        assert second.result().cached_tokens == len(DOCUMENT)
        assert second.result().tokens == alone(engine, [*DOCUMENT, *OTHER])
        assert first.result().tokens == alone(engine, [*DOCUMENT, *QUESTION])


def test_checkpoints_are_bounded_in_bytes_and_the_least_recently_used_go_first():
    documents = [prompt(100, seed).tolist() for seed in range(60, 66)]
    with engine_of("dense", "lfm2") as engine:
        taken = engine._scheduler._checkpoints
        engine.generate(documents[0], GREEDY).result()
        each = taken.nbytes // 2
        assert each > 0
        taken._limit = 5 * each
        for tokens in documents[1:3]:
            engine.generate(tokens, GREEDY).result()
        assert taken.nbytes <= 5 * each
        # The second is used again, so that those of others go before it.
        assert engine.generate([*documents[1][:90], 7], GREEDY).result().cached_tokens == 100 - TAIL
        engine.generate(documents[3], GREEDY).result()
        assert taken.nbytes <= 5 * each
        # It has one more, where the second prompt departed from the first.
        assert engine.generate([*documents[1][:90], 8], GREEDY).result().cached_tokens == 90
        gone = engine.generate([*documents[2][:90], 9], GREEDY).result()
        assert (gone.cached_tokens, gone.reuse.reason) == (0, "cannot_go_back")
        assert gone.tokens == alone(engine, [*documents[2][:90], 9])


@pytest.mark.parametrize(
    "architecture", with_slow(["lfm2", "gemma3_text", "qwen3_next"], slow=["gemma3_text", "qwen3_next"])
)
def test_prompts_that_depart_anywhere_are_answered_as_alone(architecture, monkeypatch, tmp_path):
    """A tree of prompts, while sequences and checkpoints are dropped, and requests are answered side by side."""
    monkeypatch.setattr(checkpoints, "EVERY", 16)
    drawn, few = random.Random(3), SamplingParams(max_new_tokens=4, ignore_eos=True)
    settings = {"part": 24, "kept_prefixes": 3, "kv_tokens": 600, "context_folder": tmp_path}
    with engine_of("dense", architecture, **settings) as engine:
        taken, known, reused = engine._scheduler._checkpoints, [DOCUMENT], 0
        for number in range(8):
            branches = []
            for _ in range(2):
                trunk = drawn.choice(known)
                tail = prompt(drawn.randrange(1, 60), 100 + number).tolist()
                branches.append([*trunk[: drawn.randrange(20, 200)], *tail])
            known += branches
            question = drawn.choice([None, 5])
            streams = [engine.generate(tokens, few, question=question) for tokens in branches]
            for tokens, stream in zip(branches, streams, strict=True):
                found = stream.result()
                assert found.tokens == alone(engine, tokens, 4)
                reused += 0 < found.cached_tokens < len(tokens) - 1
            if taken._limit > 1e8:
                taken._limit = 3 * taken.nbytes
            assert taken.nbytes <= taken._limit
        assert reused > 5


def test_no_checkpoint_is_taken_of_memory_that_caches_have_reserved(monkeypatch):
    with engine_of("dense", "lfm2") as engine:
        taken = engine._scheduler._checkpoints
        engine.generate(DOCUMENT, GREEDY).result()
        before = taken.nbytes
        monkeypatch.setattr(checkpoints, "free_dram", lambda: 0)
        engine.generate(THIRD, GREEDY).result()
        assert 0 < taken.nbytes <= before


def test_dropped_sequences_leave_no_checkpoints():
    with engine_of("dense", "lfm2", kept_prefixes=1) as engine:
        for seed in range(4):
            engine.generate(prompt(100, seed).tolist(), GREEDY).result()
        one = engine._scheduler._checkpoints.nbytes
        engine.generate(prompt(100, 9).tolist(), GREEDY).result()
        assert engine._scheduler._checkpoints.nbytes == one
        while engine._prefixes.drop_oldest():
            pass
        assert engine._scheduler._checkpoints.nbytes == 0


def test_without_memory_for_checkpoints_whole_sequences_are_shared_alone():
    with engine_of("dense", "lfm2", checkpoint_gb=0) as engine:
        first = engine.generate([*DOCUMENT, *QUESTION], GREEDY, question=len(QUESTION)).result()
        assert engine.generate([*DOCUMENT, *OTHER], GREEDY).result().cached_tokens == 0
        whole = [*DOCUMENT, *QUESTION, *first.tokens[:-1]]
        assert engine.generate([*whole, *OTHER], GREEDY).result().cached_tokens == len(whole)
    with pytest.raises(HeteroKVError, match="checkpoint_gb is -1"):
        engine_of("dense", "lfm2", checkpoint_gb=-1)


def test_models_that_keep_every_token_take_no_checkpoints():
    with engine_of("quest") as engine:
        engine.generate([*DOCUMENT, *QUESTION], GREEDY, question=len(QUESTION)).result()
        assert engine._scheduler._checkpoints.nbytes == 0


def test_a_window_that_has_lost_nothing_goes_back_without_a_checkpoint():
    with engine_of("dense", "gemma3_text", {"sliding_window": 128}, checkpoint_gb=0) as engine:
        engine.generate(DOCUMENT[:80], GREEDY).result()
        branch = [*DOCUMENT[:33], *OTHER]
        found = engine.generate(branch, GREEDY).result()
        assert found.cached_tokens == 33
        assert found.tokens == alone(engine, branch)


@pytest.mark.parametrize("architecture", with_few(["lfm2", "gemma3_text"]))
def test_a_second_question_goes_on_from_the_documents_end_after_a_restart(architecture, tmp_path):
    with engine_of("dense", architecture, context_folder=tmp_path) as engine:
        engine.generate([*DOCUMENT, *QUESTION], GREEDY, question=len(QUESTION)).result()
    files = sorted(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    # The whole sequence is there once.
    assert files[-1] > sum(files[:-1])
    with engine_of("dense", architecture, context_folder=tmp_path) as engine:
        found = engine.generate([*DOCUMENT, *OTHER], GREEDY).result()
        assert (found.cached_tokens, found.reuse.source) == (len(DOCUMENT), "disk")
        assert found.tokens == alone(engine, [*DOCUMENT, *OTHER])


@pytest.mark.parametrize("architecture", with_slow(STATEFUL, slow=ALIKE))
def test_a_cache_that_returns_to_a_checkpoint_continues_bit_for_bit(architecture):
    model = tiny_model(architecture)
    inject(model, small_recipe("dense"))
    cache = HeteroCache(model, 400)
    ids = torch.tensor([DOCUMENT])

    def passed(fork, tokens):
        with torch.no_grad():
            return model(tokens, past_key_values=fork).logits

    passed(cache, ids[:, :100])
    point = cache.checkpoint()
    expected = passed(cache.fork(), ids[:, 150:])
    passed(cache, ids[:, 100:150])
    for _ in range(2):
        fork = cache.fork()
        fork.crop(-50, point)
        assert fork.get_seq_length() == 100
        assert torch.equal(passed(fork, ids[:, 150:]), expected)
    with pytest.raises(HeteroKVError, match="a checkpoint of 100 tokens cannot cut 1 sequences to 101"):
        cache.fork().crop(-49, point)
    assert cache.get_seq_length() == 150


def test_a_cache_whose_layers_keep_every_token_has_no_checkpoint():
    model = tiny_model("llama")
    inject(model, small_recipe("dense"))
    cache = HeteroCache(model, 400)
    with torch.no_grad():
        model(torch.tensor([DOCUMENT]), past_key_values=cache)
    assert cache.checkpoint() is None


def test_transformers_own_sliding_layers_go_back_to_checkpoints():
    """Rules that leave a model's sliding attention as it is."""
    model = tiny_model("gemma3_text")
    left = operator_in(r"layers\.[02]\.self_attn$", "default")
    inject(model, mixed(left, operator_in("self_attn$", "RetrievalAttention", top_k_blocks="all")))
    loaded = LoadedModel(model, Numbers(), "tiny", 512)
    with Engine(loaded, max_seq_len=250, starts_thread=False, longest_gap_s=1e6) as engine:
        assert {type(layer) for layer in HeteroCache(model).layers[::2]} == {DynamicSlidingWindowLayer}
        engine.generate([*DOCUMENT, *QUESTION], GREEDY, question=len(QUESTION)).result()
        found = engine.generate([*DOCUMENT, *OTHER], GREEDY).result()
        assert found.cached_tokens == len(DOCUMENT)
        assert found.tokens == alone(engine, [*DOCUMENT, *OTHER])
        near = engine.generate([*DOCUMENT[:120], *OTHER], GREEDY).result()
        assert (near.cached_tokens, near.reuse.reason) == (0, "cannot_go_back")
        assert "DynamicSlidingWindowLayer" in near.reuse.text
        assert near.tokens == alone(engine, [*DOCUMENT[:120], *OTHER])
