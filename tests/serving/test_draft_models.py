"""Guesses of a draft model: whatever it guesses, and whatever becomes of it, the answer has the tokens without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import ConfigError, OutOfMemoryError
from hetero_kv.models.loading import LoadedModel
from hetero_kv.serving.speculation import speculation
from hetero_kv.serving.speculation.draft_model import DraftModel
from hetero_kv.serving.speculation.opening import open_speculation
from tests.serving.number_tokenizer import Numbers
from tests.serving.short_memory import LOAD, LONG, ROOM
from tests.serving.tiny_engine import PROMPTS, alone, engine_of
from tests.support.free_rows import FreeRows
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread", "_few_guesses")

PROMPT = PROMPTS[2]
SHORT = replace(LONG, max_new_tokens=16)
DRAWN = replace(SHORT, temperature=1.0, seed=3, frequency_penalty=0.5)


class Padded(Numbers):
    """The same tokens, and some that fill the vocabulary."""

    def get_vocab(self):
        return {**super().get_vocab(), **{f"[PAD{number}]": number for number in range(97, 300)}}


class Others(Numbers):
    """Tokens of which one is another."""

    def get_vocab(self):
        return {**super().get_vocab(), "forty": 40} | {"40": 500}


def draft_of(architecture="llama", seed=0, tokenizer=None, recipe="dense", **changes):
    """A draft model; with seed 0, its weights are those of `engine_of`'s model of this architecture."""
    model = tiny_model(architecture, seed, **changes)
    injected(model, small_recipe(recipe, max_seq_len=400))
    return LoadedModel(model, tokenizer or Numbers(), "small", 512)


@pytest.fixture
def _few_guesses(monkeypatch):
    monkeypatch.setattr(speculation, "MOST_GUESSES", 4)


@pytest.fixture(scope="module")
def same():
    """A draft model that is always right."""
    return draft_of()


@pytest.fixture(scope="module")
def answer():
    """The likeliest answer to PROMPT, without guesses."""
    with engine_of("dense") as engine:
        return engine.generate(PROMPT, SHORT).result().tokens


def guessing(draft, recipe="dense", **settings):
    """An engine that guesses as many tokens as it can, whatever the machine's speed."""
    engine = engine_of(recipe, speculation=draft, **settings)
    engine._speculation.costs = FreeRows()
    return engine


def draft_model(loaded, tokens, capacity=400):
    """A draft model whose sequences hold so many tokens together."""
    store = loaded.model.hetero_kv_injection.common_store(capacity, 4, tokens)
    return DraftModel(loaded, store, 97, 1e6)


def require_all_free(draft):
    for allocator in draft._store.allocators.values():
        assert allocator.free_blocks == allocator.num_blocks


@pytest.mark.parametrize("params", [SHORT, DRAWN], ids=["greedy", "drawn"])
def test_a_draft_of_the_same_weights_is_right_and_changes_no_token(same, params):
    with guessing(same) as engine:
        without = engine.generate(PROMPT, params, speculation="off").result()
        found = engine.generate(PROMPT, params).result()
        draft = engine._speculation.draft
    assert found.tokens == without.tokens
    assert found.drafted_tokens > 8
    assert (found.accepted_tokens == found.drafted_tokens) == (params is SHORT)
    require_all_free(draft)


def test_a_draft_of_other_weights_is_wrong_and_changes_no_token(answer):
    with guessing(draft_of(seed=1)) as engine:
        found = engine.generate(PROMPT, SHORT).result()
    assert found.tokens == answer
    assert found.accepted_tokens < found.drafted_tokens / 4


@pytest.mark.parametrize("seed", [0, 1])
def test_a_draft_with_sliding_windows_goes_back_to_before_its_guesses(seed):
    # Windows of 16 tokens, which forget what guesses push out.
    draft = draft_of("gemma3_text", seed)
    with engine_of("quest", "gemma3_text", speculation=draft) as engine:
        engine._speculation.costs = FreeRows()
        found = engine.generate(PROMPT, SHORT).result()
        assert found.tokens == alone(engine, PROMPT, 16)
    assert found.drafted_tokens > 8
    assert (found.accepted_tokens > found.drafted_tokens / 2) == (seed == 0)


def test_rows_guess_together_and_each_gets_its_tokens(same, monkeypatch):
    with guessing(same) as engine:
        # Otherwise the machine's speed would decide whether requests meet in a step.
        engine._speculation.costs = FreeRows()
        draft, rows = engine._speculation.draft, []
        decode = draft._forward.decode
        monkeypatch.setattr(
            draft._forward, "decode", lambda caches, tokens: rows.append(len(caches)) or decode(caches, tokens)
        )
        streams = [engine.generate(tokens, LONG) for tokens in PROMPTS[:3]]
        assert [stream.result().tokens for stream in streams] == [alone(engine, each, 40) for each in PROMPTS[:3]]
    assert 3 in rows


def test_a_stop_text_and_a_short_answer_end_within_a_draft(same, answer):
    with guessing(same) as engine:
        place = next(place for place in range(5, 14) if answer[place] not in answer[:place])
        stopping = replace(SHORT, stop=(f" {answer[place]} ",))
        assert engine.generate(PROMPT, stopping).result().tokens == answer[: place + 1]
        for count in (1, 2, 5):
            short = replace(SHORT, max_new_tokens=count)
            assert engine.generate(PROMPT, short).result().tokens == answer[:count]


def passed_prompts(draft, monkeypatch):
    """The sizes of the parts of prompts that pass the draft model from now on."""
    sizes, prompt = [], draft._forward.prompt
    monkeypatch.setattr(
        draft._forward, "prompt", lambda cache, tokens: sizes.append(len(tokens)) or prompt(cache, tokens)
    )
    return sizes


def test_a_prompt_that_begins_as_an_earlier_one_passes_the_draft_model_once(same, answer, monkeypatch):
    with guessing(same) as engine:
        sizes = passed_prompts(engine._speculation.draft, monkeypatch)
        engine.generate(PROMPT, SHORT).result()
        # Small parts, because nothing is known of its speed, then all that is left.
        assert sum(sizes) >= len(PROMPT)
        assert sizes[0] < 64
        sizes.clear()
        again = engine.generate([*PROMPT, *answer[:10], 5, 6, 7], SHORT).result()
        assert again.drafted_tokens > 0
        assert sum(sizes) <= 3
        # Of another tenant nothing is taken over.
        engine.generate(PROMPT, SHORT, tenant="other").result()
        assert sum(sizes) >= len(PROMPT)


def test_a_prompt_passes_the_draft_model_only_where_that_may_pay(same, monkeypatch):
    with guessing(same) as engine:
        draft = engine._speculation.draft
        sizes = passed_prompts(draft, monkeypatch)
        # A token of its prompt takes as long as ten steps.
        draft._part_size.passed(1, 10.0)
        found = engine.generate(PROMPT, SHORT).result()
    assert (sizes, found.drafted_tokens) == ([], 0)


def test_a_cancelled_request_leaves_nothing_in_the_draft_models_store(same, answer):
    with guessing(same, kept_prefixes=0) as engine:
        stream = engine.generate(PROMPT, SHORT)
        pieces = iter(stream)
        for _ in range(6):
            next(pieces)
        stream.cancel()
        given = stream.result().tokens
        assert given == answer[: len(given)]
        draft = engine._speculation.draft
        assert draft._kept.kept == 1
    require_all_free(draft)


def test_a_full_cache_of_the_draft_model_ends_its_guesses_and_not_the_answer(same, answer, caplog):
    with guessing(draft_model(same, 400, capacity=len(PROMPT) + 8)) as engine:
        found = engine.generate(PROMPT, SHORT).result()
    assert found.tokens == answer
    assert 0 < found.drafted_tokens < 8
    assert ["guesses no more" in line for line in caplog.messages].count(True) == 1
    assert "the cache is full" in caplog.text


def test_kept_sequences_of_the_draft_model_make_room_for_new_ones(same):
    with guessing(draft_model(same, 224)) as engine:
        for tokens in (PROMPTS[2], PROMPTS[6]):
            found = engine.generate(tokens, SHORT).result()
            assert found.drafted_tokens > 8
        assert engine._speculation.draft._kept.kept == 1


@pytest.mark.parametrize(
    ("method", "error"), [("prompt", MemoryError), ("decode", CacheFullError), ("verify", ArithmeticError)]
)
def test_an_error_of_the_draft_model_ends_its_guesses_and_not_the_answer(
    same, answer, method, error, monkeypatch, caplog
):
    with guessing(same) as engine:
        draft = engine._speculation.draft

        def failing(*arguments):
            raise error("of the draft model")

        stream = engine.generate(PROMPT, SHORT)
        pieces = iter(stream)
        next(pieces)
        monkeypatch.setattr(draft._forward, method, failing)
        assert stream.result().tokens == answer
        assert [f"{error.__name__}: of the draft model" in line for line in caplog.messages] == [True]
        monkeypatch.undo()
        assert engine.generate(PROMPT, SHORT).result().drafted_tokens > 8


def test_an_error_for_one_sequence_leaves_the_guesses_of_others(same, monkeypatch):
    with guessing(same) as engine:
        draft = engine._speculation.draft
        decode = draft._forward.decode

        def failing(caches, tokens):
            if any(61 < cache.get_seq_length() < 100 for cache in caches):
                raise MemoryError
            return decode(caches, tokens)

        monkeypatch.setattr(draft._forward, "decode", failing)
        streams = [engine.generate(PROMPTS[index], SHORT) for index in (1, 2)]
        found = [stream.result() for stream in streams]
        assert [each.tokens for each in found] == [alone(engine, PROMPTS[index], 16) for index in (1, 2)]
    assert found[0].drafted_tokens < found[1].drafted_tokens


@pytest.mark.usefixtures("short_reserve")
def test_preempted_requests_go_on_with_guesses(same, preempted):
    with guessing(same, kv_tokens=ROOM, kept_prefixes=0) as engine:
        found = [stream.result() for stream in [engine.generate(tokens, LONG) for tokens in LOAD]]
        assert preempted
        assert [each.tokens for each in found] == [alone(engine, tokens, 40) for tokens in LOAD]
        assert all(each.drafted_tokens for each in found)
        draft = engine._speculation.draft
    require_all_free(draft)


def test_an_interrupt_while_it_guesses_loses_no_token(same, answer, monkeypatch):
    with guessing(same) as engine:
        draft = engine._speculation.draft
        drafter = draft.drafter(PROMPT)
        drafter.add(answer[0])
        while not drafter.guesses(1):
            pass
        interrupted, decode = [], draft._forward.decode

        def interrupting(caches, tokens):
            found = decode(caches, tokens)
            if len(interrupted) < 2:
                interrupted.append(caches)
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(draft._forward, "decode", interrupting)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                drafter.guesses(4)
        drafter.add(answer[1])
        assert tuple(drafter.guesses(4)) == answer[2:6]
        drafter.release()


def test_padding_and_a_few_tokens_more_are_the_same_vocabulary(answer):
    with guessing(draft_of(tokenizer=Padded(), vocab_size=300)) as engine:
        assert engine.generate(PROMPT, SHORT).result().tokens == answer


def test_a_token_that_a_smaller_vocabulary_lacks_ends_the_guesses(answer, caplog):
    assert max(PROMPT) >= 90
    with guessing(draft_of(vocab_size=90)) as engine:
        found = engine.generate(PROMPT, SHORT).result()
    assert (found.tokens, found.drafted_tokens) == (answer, 0)
    assert "is not one of its 90" in caplog.text


def test_a_request_names_what_the_engine_has_and_no_other_model(same):
    with guessing(same) as engine:
        assert engine.speculation == "small"
        for way, named in (
            ("off", None),
            ("lookup", "LookupDrafter"),
            ("small", "ModelDrafter"),
            (None, "ModelDrafter"),
        ):
            drafter = engine._speculation.drafter(PROMPT, way)
            assert (drafter and type(drafter).__name__) == named
        with pytest.raises(
            ConfigError, match="speculation is '/other'; it must be one of off, lookup, sparse, auto, small"
        ):
            engine.generate(PROMPT, SHORT, speculation="/other")


def test_it_is_planned_beside_the_model_within_the_budget(same, caplog):
    with engine_of() as engine:
        forward = engine._scheduler.forward
        opened = open_speculation(forward, Numbers(), same, max_seq_len=600, sequences=3)
        assert opened.draft._store.capacity == 512
        assert "the draft model small takes 512 tokens of a sequence" in caplog.text
        injection = same.model.hetero_kv_injection
        budget = injection.engine
        try:
            injection.engine = replace(budget, dram_budget_gb=1e-6)
            with pytest.raises(OutOfMemoryError, match=r"keys and values of the draft model small: .*dram_budget_gb"):
                open_speculation(forward, Numbers(), same, max_seq_len=300)
        finally:
            injection.engine = budget
