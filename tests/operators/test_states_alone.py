"""Models without attention keep states alone: rules carry these from chunk to chunk, turn to turn and row to row."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter import recurrent
from hetero_kv.adapter.attention_module import text_config
from hetero_kv.engine.recurrent_state import is_state, named_states
from hetero_kv.errors import HeteroKVError
from hetero_kv.planning.plan import Footprint
from hetero_kv.rules.matching import InjectionError
from hetero_kv.rules.rule_file import parse_rules
from tests.operators.bounded_models import relative_error, tokens
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of
from tests.support.slow_variants import with_few
from tests.support.tiny_models import STATES_ALONE, tiny_model

SETTINGS = {"chunk_size": 16, "max_seq_len": 256}
PROMPT, TURN, TOTAL = 37, 40, 50
IDS = tokens(TOTAL)

pytestmark = pytest.mark.usefixtures("one_thread")


def answered(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **kwargs).logits


def whole_of(model):
    """transformers' logits of all tokens at once."""
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(params=with_few(list(STATES_ALONE), ("mamba", "mamba2")))
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize("recipe", ["dense", "adaptive", "shadowkv", "streaming_llm"])
def test_under_every_rule_chunks_tokens_and_turns_equal_transformers(model, recipe):
    whole = whole_of(model)
    inject(model, recipe, command_line={"chunk_size": 16})
    cache = HeteroCache(model, max_seq_len=128)
    parts = [IDS[:, :PROMPT], *IDS[:, PROMPT:TURN].split(1, dim=1), IDS[:, TURN:]]
    assert relative_error(torch.cat([answered(model, cache, part) for part in parts], dim=1), whole) < 1e-4
    assert cache.get_seq_length() == TOTAL
    eject(model)
    assert whole_of(model).equal(whole)


def test_a_call_may_name_its_cache_as_the_model_does(model):
    whole = whole_of(model)
    inject(model, "dense", command_line=SETTINGS)
    cache = HeteroCache(model)
    with torch.no_grad():
        first = model(IDS[:, :PROMPT], cache_params=cache)
        logits = torch.cat([first.logits, model(IDS[:, PROMPT:], cache_params=first.cache_params).logits], dim=1)
        made = model(IDS)
    assert first.cache_params is cache
    assert isinstance(made.cache_params, HeteroCache)
    assert relative_error(logits, whole) < 1e-4
    assert relative_error(made.logits, whole) < 1e-4


@pytest.mark.parametrize("beams", [1, 2])
def test_generate_gives_the_untouched_models_tokens(model, beams):
    settings = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False}
    expected = model.generate(IDS, **settings)
    inject(model, "dense", command_line=SETTINGS)
    assert model.generate(IDS, **settings).equal(expected)
    assert model.generate(IDS, past_key_values=HeteroCache(model), **settings).equal(expected)


def test_rows_of_several_lengths_equal_each_row_alone(model):
    ids, mask = tokens(40, batch=2), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :9] = 0
    with torch.no_grad():
        alone = [model(row[kept.bool()][None]).logits[:, -3:] for row, kept in zip(ids, mask, strict=True)]
    inject(model, "dense", command_line=SETTINGS)
    cache = HeteroCache(model)
    logits = [answered(model, cache, ids[:, :38], attention_mask=mask[:, :38])[:, -1:]]
    logits += [answered(model, cache, ids[:, i : i + 1], attention_mask=mask[:, : i + 1]) for i in range(38, 40)]
    assert relative_error(torch.cat(logits, dim=1), torch.cat(alone)) < 1e-4


def test_rows_of_one_length_pass_in_chunks_with_a_mask_that_hides_nothing(model):
    ids = tokens(40, batch=2)
    with torch.no_grad():
        whole = model(ids).logits
    inject(model, "dense", command_line=SETTINGS)
    found = answered(model, HeteroCache(model), ids, attention_mask=torch.ones(2, 40, dtype=torch.int64))
    assert relative_error(found, whole) < 1e-4


def test_forks_go_on_alone_files_go_on_bit_for_bit_and_going_back_is_refused(model, tmp_path):
    inject(model, "dense", command_line=SETTINGS)
    cache = HeteroCache(model)
    answered(model, cache, IDS[:, :TURN])
    fork, again = cache.fork(), cache.fork()
    second = answered(model, cache, IDS[:, TURN:])
    answered(model, fork, tokens(3, 3))
    assert answered(model, again, IDS[:, TURN:]).equal(second)
    with pytest.raises(HeteroKVError, match=r"cannot roll back.*LinearAttentionLayer.*fork\(\)"):
        fork.crop(-1)
    cache.save(tmp_path / "context", IDS)
    following = answered(model, cache, IDS[:, :4])
    assert answered(model, HeteroCache.load(tmp_path / "context", model), IDS[:, :4]).equal(following)


def test_the_plan_counts_the_states_and_no_tokens(model):
    inject(model, "dense", command_line={**SETTINGS, "max_seq_len": "auto"})
    injection = model.hetero_kv_injection
    cache = HeteroCache(model)
    answered(model, cache, IDS)
    kept = [state.nbytes for layer in cache.layers if is_state(layer) for state in named_states(layer).values()]
    assert len(kept) == sum(len(shape.tensors) for shape in recurrent.state_shapes(model, text_config(model)).values())
    assert Footprint.of(injection).memory(1000).states == 2 * sum(kept) > 0
    assert injection.bytes_per_token() == 0
    assert cache.max_seq_len is None


@pytest.mark.parametrize("architecture", with_few(list(STATES_ALONE), ("mamba2",)))
def test_requests_at_a_time_have_the_tokens_of_each_alone_and_go_on_from_a_document(architecture):
    with engine_of("dense", architecture, part=16) as engine:
        streams = [engine.generate(prompt, GREEDY) for prompt in PROMPTS[:3]]
        answers = [stream.result().tokens for stream in streams]
        assert answers == [alone(engine, prompt) for prompt in PROMPTS[:3]]
        document, question, other = PROMPTS[3], PROMPTS[0], PROMPTS[4]
        engine.generate([*document, *question], GREEDY, question=len(question)).result()
        found = engine.generate([*document, *other], GREEDY, question=len(other)).result()
        assert found.cached_tokens == len(document)
        assert found.tokens == alone(engine, [*document, *other])


def test_rules_that_leave_the_layers_whole_are_refused_by_name():
    rule = {"match": {"name": r"layers\.\d+\.mixer$"}, "replace": {"class": "RetrievalAttention"}}
    with pytest.raises(InjectionError, match=r"Mamba2ForCausalLM.*keeps states alone; add a rule.*ChunkedDecoderLayer"):
        inject(tiny_model("mamba2"), parse_rules({"rules": [rule]}))
