"""Recipes with a sparse prefill, in whole models."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.step import Step
from hetero_kv.errors import ConfigError
from hetero_kv.families.sparse_prefill import minference
from hetero_kv.families.sparse_prefill.chunk import Chunk
from tests.families.sparse_prompts import logits
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model


def test_with_everything_chosen_learned_sinks_take_their_share():
    # The sinks of a random model are too small to be seen.
    model = tiny_model("gpt_oss", max_position_embeddings=2048)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, 6.0)
    ids = torch.randint(1, 97, (1, 250), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model(ids).logits
    assert torch.allclose(logits(model, "flexprefill", ids, prefill_mass=1.0), exact, atol=1e-3)


def test_the_last_queries_of_a_prompt_attend_to_everything_in_whatever_chunk_they_are(qwen2, monkeypatch):
    ids, seen = torch.randint(1, 97, (1, 410), generator=torch.Generator().manual_seed(1)), []
    chosen = Chunk.attention
    monkeypatch.setattr(Chunk, "attention", lambda self, keys, whole=0: seen.append((self.n, whole)) or chosen(
        self, keys, whole))  # fmt: skip
    logits(qwen2, "flexprefill", ids, prefill_last=30, prefill_mass=0.1, prefill_min_budget=64)
    assert seen == [(136, 0), (200, 20), (10, 30)] * 3


@pytest.mark.parametrize(("first", "chunk"), [(64, 200), (130, 200), (300, 200), (200, 200), (301, 64), (90, 1000)])
def test_the_first_tokens_of_a_context_attend_to_everything_in_whatever_chunk_they_are(qwen2, first, chunk):
    ids = torch.randint(1, 97, (2, 410), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = qwen2(ids).logits
    few = {"prefill_last": 0, "prefill_mass": 0.1, "prefill_min_budget": 64}
    found = logits(qwen2, "flexprefill", ids, prefill_from=first, chunk_size=chunk, **few)
    assert torch.allclose(found[:, :first], exact[:, :first], atol=1e-3)
    # A block of queries attends to its own tokens; the next has left something out.
    assert not torch.allclose(found[:, first + 64 :], exact[:, first + 64 :], atol=1e-2)


@pytest.mark.parametrize(
    "recipe", with_few(["minference", "flexprefill", "shadowkv_minference"], quick=["minference", "flexprefill"])
)
def test_with_everything_chosen_a_prompt_prefills_exactly(qwen2, recipe):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(1))
    everything = {"prefill_mass": 1.0} if recipe == "flexprefill" else {"prefill_budget": 4096, "error_budget": 0.0}
    extra = {"rank": 16} if recipe.startswith("shadowkv") else {}
    with torch.no_grad():
        exact = qwen2(ids).logits
    assert torch.allclose(logits(qwen2, recipe, ids, 2, **everything, **extra), exact, atol=1e-3)


def test_retrieval_of_single_tokens_takes_a_sparse_prefill(qwen2):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = qwen2(ids).logits
    assert torch.allclose(logits(qwen2, "sparq", ids, prefill="flexprefill", prefill_mass=1.0), exact, atol=1e-3)
    few = {"prefill": "flexprefill", "prefill_mass": 0.1, "prefill_min_budget": 64}
    assert not torch.allclose(logits(qwen2, "sparq", ids, **few), exact, atol=1e-2)
    for settings, is_exact in ((few, False), ({}, True)):
        operator = next(iter(inject(qwen2, "sparq", command_line=settings).attention_operators()))
        eject(qwen2)
        assert operator.prefills_exactly is operator.continues_exactly is is_exact
        assert any(name.startswith("prefill") for name in operator.stored_by()) is not is_exact


@pytest.mark.parametrize(
    "policy", with_few(["h2o", "snapkv_evict", "pyramidkv", "roco", "d2o", "cam"], quick=["h2o", "pyramidkv"])
)
def test_policies_of_whole_prompts_take_a_sparse_prefill(qwen2, policy):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(1))
    sparse = {"prefill": "flexprefill", "budget": 600, "kv_type": None}
    with torch.no_grad():
        exact = qwen2(ids).logits
    assert torch.allclose(logits(qwen2, policy, ids, **sparse, prefill_mass=1.0), exact, atol=1e-3)
    assert not torch.allclose(
        logits(qwen2, policy, ids, **sparse, prefill_mass=0.1, prefill_min_budget=64), exact, atol=1e-2
    )
    for settings, names in (({}, set()), ({"prefill": "flexprefill"}, {"prefill", "prefill_mass"})):
        operator = next(iter(inject(qwen2, policy, command_line=settings).attention_operators()))
        eject(qwen2)
        stored = {name for name in operator.stored_by() if name.startswith("prefill")}
        assert names <= stored
        assert bool(stored) is bool(names)


def test_a_policy_drops_entries_behind_a_sparse_prefill(qwen2):
    ids = torch.randint(1, 97, (1, 500), generator=torch.Generator().manual_seed(1))
    settings = {"prefill": "flexprefill", "prefill_from": 64, "budget": 100, "recent_tokens": 8, "threads_num": 1}
    inject(qwen2, "snapkv_evict", command_line=settings)
    try:
        cache = HeteroCache(qwen2)
        with torch.no_grad():
            for part in (ids, ids[:, :1], ids[:, :90]):
                qwen2(part, past_key_values=cache)
        assert cache.statistics["cached_entries"] == [100] * 3
    finally:
        eject(qwen2)


@pytest.mark.parametrize("recipe", ["streaming_llm", "tova", "sirllm", "cascade", "infinipot", "bigbird"])
def test_policies_of_strides_refuse_a_sparse_prefill_by_name(qwen2, recipe):
    """A stride attends to what is kept, which is little, and has gaps."""
    with pytest.raises(ConfigError, match=rf"prefill has no effect here.*BoundedAttention \({recipe}\)"):
        inject(qwen2, recipe, command_line={"prefill": "flexprefill"})


def test_grouped_positions_refuse_a_sparse_prefill(qwen2):
    with pytest.raises(ConfigError, match="set dense"):
        inject(qwen2, "self_extend", command_line={"prefill": "flexprefill"})


@pytest.mark.parametrize("recipe", ["minference", "flexprefill"])
def test_a_sparse_prefill_is_not_called_exact(qwen2, recipe):
    injection = inject(qwen2, recipe)
    operators = list(injection.attention_operators())
    eject(qwen2)
    assert not any(each.prefills_exactly or each.continues_exactly for each in operators)
    assert operators[0].stored_by()["prefill"] == recipe
    injection = inject(qwen2, "dense")
    assert not any(name.startswith("prefill") for name in next(iter(injection.attention_operators())).stored_by())
    eject(qwen2)


@pytest.mark.parametrize(("policy", "second"), [("snapkv_evict", 100), ("h2o", 100), ("h2o", 600)])
def test_a_later_turns_last_queries_attend_to_everything_that_a_policy_has_kept(qwen2, monkeypatch, policy, second):
    seen, chosen = [], Chunk.attention
    monkeypatch.setattr(Chunk, "attention", lambda self, keys, whole=0: seen.append((self.past, self.n, whole)) or (
        chosen(self, keys, whole)))  # fmt: skip
    settings = {"prefill": "flexprefill", "prefill_from": 64, "prefill_last": 50, "chunk_size": 128, "budget": second}
    inject(qwen2, policy, command_line={**settings, "max_seq_len": 1024, "threads_num": 1})
    try:
        cache = HeteroCache(qwen2)
        with torch.no_grad():
            for seed in range(2):
                ids = torch.randint(1, 97, (1, 300), generator=torch.Generator().manual_seed(seed))
                qwen2(ids, past_key_values=cache)
    finally:
        eject(qwen2)
    kept = min(second, 300)
    assert seen[:3] == [(64, 64, 0), (128, 128, 6), (256, 44, 50)]
    assert seen[9:12] == [(kept, 128, 0), (kept + 128, 128, 6), (kept + 256, 44, 50)]


def test_all_chunks_of_a_prompt_have_one_price(qwen2, monkeypatch):
    ids = torch.randint(1, 97, (1, 500), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(minference, "_PRICED_LENGTH", 250)
    prices, best_pattern = [], minference.best_pattern
    monkeypatch.setattr(
        minference, "best_pattern", lambda tried, price: prices.append(price) or best_pattern(tried, price)
    )
    logits(qwen2, "minference", ids, 2, prefill_budget=128, error_budget=0.4)
    # The second prefill's three chunks in three layers of four heads.
    assert prices == [0.1] * 36


@pytest.mark.parametrize(("length", "matches"), [(16384, 0), (16385, 2)])
def test_blocks_are_matched_in_long_contexts_alone(length, matches):
    assert minference.matches_at(2, length) == matches


def test_blocks_that_queries_match_are_attended_to_besides(qwen2, monkeypatch):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(minference, "_PRICED_LENGTH", 250)
    few = {"prefill_budget": 128, "error_budget": 1.0, "prefill_last": 0}
    exact = logits(qwen2, "dense", ids)
    off = [
        (logits(qwen2, "minference", ids, 2, **few, prefill_matches=matches) - exact).norm() for matches in (0, 1, 100)
    ]
    assert off[0] > 1.1 * off[1]
    assert off[1] > 2 * off[2]
    monkeypatch.setattr(minference, "_PRICED_LENGTH", 500)
    with_none, with_some = (logits(qwen2, "minference", ids, 2, **few, prefill_matches=each) for each in (0, 2))
    assert torch.equal(with_none, with_some)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_the_first_layer_that_would_leave_keys_out_says_that_it_cannot(architecture, caplog):
    model, step = tiny_model(architecture, max_position_embeddings=1024), Step.__new__(Step)
    injection = inject(model, "flexprefill", command_line={"max_seq_len": 512})
    on_meta = torch.empty(1, 4, 8, 16, device="meta")
    elsewhere = AttentionCall(on_meta, on_meta, on_meta, 1.0, None, None, None)
    prompts = [getattr(operator, "prompt_attention", None) for operator in injection.attention_operators()]
    prompts = [each for each in prompts if each is not None]
    assert prompts
    assert not any(prompt._can(step, elsewhere) for prompt in prompts)
    assert [record.getMessage() for record in caplog.records] == [
        "prefill flexprefill: this prompt attends to all tokens, because it is sparse on a CPU and on CUDA, not on meta"
    ]
