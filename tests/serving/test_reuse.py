"""An answer says how much of its prompt was computed before, and why no more."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import SamplingParams
from hetero_kv.serving.reuse import Reuse
from tests.serving.tiny_engine import PROMPTS, alone, engine_of
from tests.support.ragged_rows import prompt

pytestmark = pytest.mark.usefixtures("one_thread")

ONE = SamplingParams(max_new_tokens=1)
FIRST, OTHER = prompt(130, 70).tolist(), prompt(40, 71).tolist()


def reuse_of(engine, tokens):
    stream = engine.generate(tokens, ONE)
    completion = stream.result()
    assert completion.reuse.tokens == completion.cached_tokens
    assert stream.reuse == completion.reuse
    assert all(word not in completion.reuse.text for word in ("{", "None"))
    return completion.reuse


@pytest.fixture(scope="module")
def engine():
    with engine_of("dense") as engine:
        yield engine


@pytest.fixture
def known(engine):
    """An engine that knows one prompt."""
    while engine._prefixes.drop_oldest():
        pass
    assert reuse_of(engine, FIRST) == Reuse(0, "nothing_kept")
    return engine


def test_a_prompt_that_is_known_is_reused_but_for_its_last_token(known):
    found = reuse_of(known, FIRST)
    assert found == Reuse(129, "all", 129, "memory")
    assert found.text == "all but the last of the prompt's 130 tokens were computed before"


def test_a_prompt_that_goes_on_behind_a_sequence_extends_it(known):
    assert reuse_of(known, [*FIRST, *OTHER]) == Reuse(130, "extends", 130, "memory")


def test_a_prompt_that_departs_says_where(known):
    changed = [*FIRST[:77], (FIRST[77] + 1) % 97, *FIRST[78:]]
    found = reuse_of(known, changed)
    assert found == Reuse(77, "differs", 77, "memory")
    assert "from token 77 on" in found.text


def test_a_prompt_that_begins_otherwise_says_that_nothing_is_alike(known):
    assert reuse_of(known, [(FIRST[0] + 1) % 97, *FIRST[1:]]) == Reuse(0, "nothing_alike")


def test_the_sequence_that_begins_most_alike_counts(known):
    reuse_of(known, [*FIRST[:50], *OTHER])
    assert reuse_of(known, [*FIRST[:50], *OTHER[:10], *FIRST[:5]]).tokens == 60
    assert reuse_of(known, [*FIRST[:90], *OTHER]).tokens == 90


def test_a_request_may_compute_all_of_its_prompt(known):
    found = known.generate([*FIRST, *OTHER], ONE, reuses=False).result()
    assert found.reuse == Reuse(0, "off")
    assert "off" in found.reuse.text


def test_other_weights_are_named():
    with engine_of("dense") as engine:
        reuse_of(engine, FIRST)
        with torch.no_grad():
            engine._scheduler.forward.model.model.layers[0].mlp.down_proj.weight.mul_(2)
        found = reuse_of(engine, [*FIRST, *OTHER])
        assert found == Reuse(0, "other_weights", 130)
        assert "the same 130 tokens was computed under other weights" in found.text


@pytest.mark.parametrize("recipe", ["infinipot", "minference"])
def test_rules_under_which_nothing_is_shared_say_so(recipe):
    with engine_of(recipe) as engine:
        reuse_of(engine, PROMPTS[1])
        assert reuse_of(engine, [*PROMPTS[1], 5]) == Reuse(0, "not_exact")


def test_layers_that_cannot_go_back_are_named():
    with engine_of("dense", "lfm2", checkpoint_gb=0) as engine:
        reuse_of(engine, FIRST)
        found = reuse_of(engine, [*FIRST[:100], *OTHER])
        assert found == Reuse(0, "cannot_go_back", 100, None, "LinearAttentionLayer")
        assert "at token 100, and layers of kind LinearAttentionLayer" in found.text


def test_stored_contexts_say_that_they_are_from_the_disk(tmp_path):
    with engine_of("dense", context_folder=tmp_path) as engine:
        reuse_of(engine, FIRST)
    with engine_of("dense", context_folder=tmp_path) as engine:
        assert reuse_of(engine, [*FIRST, *OTHER]) == Reuse(130, "extends", 130, "disk")
    with engine_of("dense", context_folder=tmp_path) as engine:
        assert reuse_of(engine, [*FIRST[:100], *OTHER]) == Reuse(100, "differs", 100, "disk")


def test_a_stored_context_that_cannot_be_loaded_is_named(tmp_path):
    with engine_of("dense", context_folder=tmp_path) as engine:
        reuse_of(engine, FIRST)
    with engine_of("dense", context_folder=tmp_path) as engine:
        engine._prefixes.stored.load = lambda *_: None
        found = reuse_of(engine, [*FIRST, *OTHER])
        assert found == Reuse(0, "not_loaded", 130)
        assert "130 tokens, and was not loaded" in found.text


def test_turns_of_a_conversation_take_one_place_among_the_kept_sequences():
    with engine_of("dense", kept_prefixes=2) as engine:
        reuse_of(engine, OTHER)
        for turn in range(3):
            reuse_of(engine, FIRST[: 60 + 20 * turn])
        assert engine.status().kept_prefixes == 2
        assert reuse_of(engine, [*OTHER, 5]).tokens == len(OTHER)
        assert reuse_of(engine, FIRST[:70]) == Reuse(69, "all", 69, "memory")


def test_a_sequence_that_a_longer_one_begins_with_takes_no_place():
    with engine_of("dense", kept_prefixes=2) as engine:
        for tokens in (OTHER, FIRST, FIRST[:60], FIRST[:80], FIRST[:100]):
            reuse_of(engine, tokens)
        assert engine.status().kept_prefixes == 2
        assert reuse_of(engine, [*OTHER, 5]).tokens == len(OTHER)
        assert reuse_of(engine, [*FIRST, 5]).tokens == len(FIRST)


def test_a_shorter_sequence_makes_a_longer_one_the_most_recently_used():
    with engine_of("dense", kept_prefixes=2) as engine:
        for tokens in (FIRST, OTHER, FIRST[:60], [*OTHER[::-1]]):
            reuse_of(engine, tokens)
        assert reuse_of(engine, [*FIRST, 5]).tokens == len(FIRST)


def test_questions_about_one_document_push_no_other_document_out():
    with engine_of("dense", kept_prefixes=3) as engine:
        for tokens in (OTHER, *([*FIRST[:100], *OTHER[number : number + 9]] for number in range(5))):
            reuse_of(engine, tokens)
        assert engine.status().kept_prefixes == 3
        assert reuse_of(engine, [*OTHER, 5]).tokens == len(OTHER)
        assert reuse_of(engine, [*FIRST[:100], *OTHER[4:13], 5]).tokens == 109


def test_a_sequence_stays_beside_a_longer_one_that_cannot_roll_back_to_it():
    with engine_of("dense", "lfm2", checkpoint_gb=0) as engine:
        reuse_of(engine, FIRST[:60])
        reuse_of(engine, FIRST)
        assert reuse_of(engine, [*FIRST[:60], *OTHER]).tokens == 60


def test_a_sequence_stays_beside_a_longer_one_of_another_tenant():
    with engine_of("dense") as engine:
        for tokens, tenant in ((FIRST[:60], "a"), (FIRST, "b")):
            engine.generate(tokens, ONE, tenant=tenant).result()
        assert engine.generate(FIRST[:70], ONE, tenant="a").result().cached_tokens == 60


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_queries_that_choose_for_an_answer_are_computed_again(place, tmp_path):
    answer = SamplingParams(max_new_tokens=12, ignore_eos=True)
    settings = {"kept_prefixes": 0, "context_folder": tmp_path} if place == "disk" else {}
    with engine_of("snapkv", **settings) as engine:
        for tokens in (FIRST, FIRST, FIRST[:-1], [*FIRST, 7]):
            found = engine.generate(tokens, answer).result()
            assert found.tokens == alone(engine, tokens)
        assert found.reuse == Reuse(131 - 12, "chooses", 119 if place == "disk" else 130, place)
        assert "from 119 on" in found.reuse.text
        # So few blocks that all of them are attended to.
        engine.generate(FIRST[:20], ONE).result()
        assert reuse_of(engine, FIRST[:20]).tokens == (0 if place == "disk" else 19)
