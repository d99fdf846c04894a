"""Recipes with a sparse prefill, whole models, and what is kept of the search for patterns."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from devices import device_called, model_on
from tiny_models import tiny_model

from gpu_ops.attention import chunk_attention
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.engine.step import Step
from hetero_kv.errors import ConfigError
from hetero_kv.families.sparse_prefill import attention, known_patterns, minference
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.minference import Pattern, Tried


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Patterns of tests are not the user's."""
    monkeypatch.setenv(known_patterns.ENVIRONMENT_VARIABLE, str(tmp_path / "patterns"))
    return tmp_path / "patterns"


@pytest.fixture(scope="module")
def qwen2():
    return tiny_model("qwen2", max_position_embeddings=2048)


def logits(model, recipe, ids, repeats=1, **settings):
    """The last of `repeats` prefills of a prompt under a recipe; a setting of None is left out."""
    engine = {"chunk_size": 200, "max_seq_len": 1024, "threads_num": 1, "kv_type": "FP32", "prefill_from": 64}
    given = {name: value for name, value in {**engine, **settings}.items() if value is not None}
    inject(model, recipe, command_line=given)
    try:
        with torch.no_grad():
            for _ in range(repeats):
                out = model(ids, past_key_values=HeteroCache(model)).logits
    finally:
        eject(model)
    return out


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
    logits(qwen2, "flexprefill", ids, prefill_last=30, prefill_mass=0.1, prefill_least=64)
    assert seen == [(136, 0), (200, 20), (10, 30)] * 3


@pytest.mark.parametrize(("first", "chunk"), [(64, 200), (130, 200), (300, 200), (200, 200), (301, 64), (90, 1000)])
def test_the_first_tokens_of_a_context_attend_to_everything_in_whatever_chunk_they_are(qwen2, first, chunk):
    ids = torch.randint(1, 97, (2, 410), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = qwen2(ids).logits
    few = {"prefill_last": 0, "prefill_mass": 0.1, "prefill_least": 64}
    found = logits(qwen2, "flexprefill", ids, prefill_from=first, chunk_size=chunk, **few)
    assert torch.allclose(found[:, :first], exact[:, :first], atol=1e-3)
    # A block of queries attends to its own tokens; the next has left something out.
    assert not torch.allclose(found[:, first + 64 :], exact[:, first + 64 :], atol=1e-2)


@pytest.mark.parametrize("recipe", ["minference", "flexprefill", "shadowkv_minference"])
def test_with_everything_chosen_a_prompt_prefills_exactly(qwen2, recipe):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(1))
    everything = {"prefill_mass": 1.0} if recipe == "flexprefill" else {"prefill_budget": 4096, "prefill_price": 0.0}
    extra = {"rank": 16} if recipe.startswith("shadowkv") else {}
    with torch.no_grad():
        exact = qwen2(ids).logits
    assert torch.allclose(logits(qwen2, recipe, ids, 2, **everything, **extra), exact, atol=1e-3)


def test_retrieval_of_single_tokens_takes_a_sparse_prefill(qwen2):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = qwen2(ids).logits
    assert torch.allclose(logits(qwen2, "sparq", ids, prefill="flexprefill", prefill_mass=1.0), exact, atol=1e-3)
    few = {"prefill": "flexprefill", "prefill_mass": 0.1, "prefill_least": 64}
    assert not torch.allclose(logits(qwen2, "sparq", ids, **few), exact, atol=1e-2)
    for settings, is_exact in ((few, False), ({}, True)):
        operator = next(iter(inject(qwen2, "sparq", command_line=settings).attention_operators()))
        eject(qwen2)
        assert operator.prefills_exactly is operator.continues_exactly is is_exact
        assert any(name.startswith("prefill") for name in operator.stored_by()) is not is_exact


@pytest.mark.parametrize("policy", ["h2o", "snapkv_evict", "pyramidkv", "roco", "d2o", "cam"])
def test_policies_of_whole_prompts_take_a_sparse_prefill(qwen2, policy):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(1))
    sparse = {"prefill": "flexprefill", "budget": 600, "kv_type": None}
    with torch.no_grad():
        exact = qwen2(ids).logits
    assert torch.allclose(logits(qwen2, policy, ids, **sparse, prefill_mass=1.0), exact, atol=1e-3)
    assert not torch.allclose(
        logits(qwen2, policy, ids, **sparse, prefill_mass=0.1, prefill_least=64), exact, atol=1e-2
    )
    for settings, names in (({}, set()), ({"prefill": "flexprefill"}, {"prefill", "prefill_mass"})):
        operator = next(iter(inject(qwen2, policy, command_line=settings).attention_operators()))
        eject(qwen2)
        stored = {name for name in operator.stored_by() if name.startswith("prefill")}
        assert names <= stored
        assert bool(stored) is bool(names)


def test_a_policy_drops_entries_behind_a_sparse_prefill(qwen2):
    ids = torch.randint(1, 97, (1, 500), generator=torch.Generator().manual_seed(1))
    settings = {"prefill": "flexprefill", "prefill_from": 64, "budget": 100, "window": 8, "threads_num": 1}
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
    with pytest.raises(ConfigError, match="take dense"):
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


def test_patterns_are_found_once_and_kept(qwen2, own_folder, monkeypatch, caplog):
    ids = torch.randint(1, 97, (1, 500), generator=torch.Generator().manual_seed(2))
    settings = {"prefill_budget": 256, "prefill_price": 1.0}
    exact = logits(qwen2, "dense", ids)
    with caplog.at_level(logging.WARNING):
        first = logits(qwen2, "minference", ids, **settings)
    assert torch.equal(first, exact)
    (file,) = own_folder.iterdir()
    assert [record.message.count(str(file)) for record in caplog.records] == [1]
    kept = json.loads(file.read_text())["layers"]
    assert len(kept) == 3
    assert all(len(each["heads"]) == 4 and each["tokens"] == 500 for each in kept.values())

    def searched(*_):
        raise AssertionError("searched again")

    monkeypatch.setattr(minference, "tried_patterns", searched)
    second = logits(qwen2, "minference", ids, **settings)
    assert not torch.allclose(second, exact, atol=1e-2)
    # Another price chooses among what has been tried; another budget tries anew.
    assert not torch.equal(logits(qwen2, "minference", ids, **settings | {"prefill_price": 0.0}), second)
    with pytest.raises(AssertionError, match="searched again"):
        logits(qwen2, "minference", ids, prefill_budget=128)
    other = tiny_model("qwen2", seed=5, max_position_embeddings=2048)
    with pytest.raises(AssertionError, match="searched again"):
        logits(other, "minference", ids, **settings)


def searches(monkeypatch, queries, least):
    """What the search for patterns is given from now on, with so many queries, for prompts of 64 * least or more."""
    seen, tried_patterns = [], minference.tried_patterns
    monkeypatch.setattr(minference, "TRIED_QUERIES", queries)
    monkeypatch.setattr(attention, "_SEARCHED_FROM", least)
    monkeypatch.setattr(
        minference,
        "tried_patterns",
        lambda chunk, exact, budget: seen.append((chunk, exact)) or tried_patterns(chunk, exact, budget),
    )
    return seen


@pytest.mark.parametrize("chunk_size", [40, 200, 400, 401, 1000])
def test_patterns_are_searched_by_a_prompts_last_queries_in_whatever_chunks_they_are(qwen2, monkeypatch, chunk_size):
    ids = torch.randint(1, 97, (1, 401), generator=torch.Generator().manual_seed(2))
    seen = searches(monkeypatch, 256, 2)
    logits(qwen2, "minference", ids, chunk_size=chunk_size, prefill_from=128)
    assert [chunk.q[:, :, -256:].shape[2] for chunk, _ in seen] == [256] * 3
    for chunk, exact in seen:
        last = chunk.last(256)
        assert (last.past, last.total) == (145, 401)
        wanted, _ = chunk_attention(last.q, last.past_k, last.past_v, last.k, last.v, last.scale, None)
        torch.testing.assert_close(exact[:, :, -256:], wanted, rtol=1e-4, atol=1e-5)


def test_patterns_are_searched_behind_no_turn_that_has_fewer_queries(qwen2, monkeypatch):
    seen = searches(monkeypatch, 256, 4)
    turns = torch.randint(1, 97, (1, 1000), generator=torch.Generator().manual_seed(2)).split([200, 250, 256, 294], 1)
    inject(qwen2, "minference", command_line={"chunk_size": 100, "max_seq_len": 1024, "prefill_from": 64})
    try:
        cache, found = HeteroCache(qwen2), []
        with torch.no_grad():
            for turn in turns:
                qwen2(turn, past_key_values=cache)
                found.append(len(seen))
    finally:
        eject(qwen2)
    assert found == [0, 0, 3, 3]
    assert seen[0][0].total == 706


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


def test_patterns_are_searched_behind_a_turn_under_a_policy_by_what_it_attends_to(qwen2, monkeypatch):
    seen = searches(monkeypatch, 256, 4)
    settings = {"prefill": "minference", "prefill_from": 64, "budget": 100, "chunk_size": 128, "max_seq_len": 1024}
    lengths, price_at = [], minference.price_at
    monkeypatch.setattr(minference, "price_at", lambda price, length: lengths.append(length) or price_at(price, length))
    inject(qwen2, "h2o", command_line=settings)
    try:
        cache = HeteroCache(qwen2)
        with torch.no_grad():
            for tokens in (200, 300, 200):
                ids = torch.randint(1, 97, (1, tokens), generator=torch.Generator().manual_seed(tokens))
                qwen2(ids, past_key_values=cache)
    finally:
        eject(qwen2)
    assert [chunk.total for chunk, _ in seen] == [400] * 3
    assert set(lengths) == {300}


def test_all_chunks_of_a_prompt_have_one_price(qwen2, monkeypatch):
    ids = torch.randint(1, 97, (1, 500), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(minference, "_PRICED_LENGTH", 250)
    prices, preferred = [], minference.preferred
    monkeypatch.setattr(minference, "preferred", lambda tried, price: prices.append(price) or preferred(tried, price))
    logits(qwen2, "minference", ids, 2, prefill_budget=128, prefill_price=0.4)
    # The second prefill's three chunks in three layers of four heads.
    assert prices == [0.1] * 36


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2, "layers": 3}', "{" * 5000, '{"format": 1, "layers": {"key": {}}}']
)
def test_a_damaged_file_of_patterns_is_none(own_folder, content):
    known = known_patterns.KnownPatterns("some/model")
    own_folder.mkdir()
    known.path.write_text(content)
    assert known.of_layer("key", 2) is None
    tried = [[Tried(Pattern("a_shape", 1, 2), 0.25, 70.5), Tried(Pattern("block_sparse", 0, 64), 0.0, 128.0)]] * 2
    known.add("key", tried, 9)
    assert known.of_layer("key", 2) == tried
    assert known.path.parent == own_folder


_ROW = ["a_shape", 1, 2, 0.1, 64.0]


@pytest.mark.parametrize(
    "row",
    [
        *([*_ROW[:place], wrong, *_ROW[place + 1 :]] for place, wrong in enumerate(["b_shape", -1, True, -0.1, "64"])),
        _ROW[:3],
        [*_ROW, 1],
        [*_ROW[:3], float("nan"), 64.0],
        7,
    ],
)
def test_an_entry_that_is_no_pattern_is_none(own_folder, row):
    known = known_patterns.KnownPatterns("model")
    known.add("other", [], 1)
    said = json.loads(known.path.read_text())
    for heads, is_known in ([[_ROW]], True), ([[_ROW, row]], False), ([[]], False), ([row], False):
        said["layers"]["key"] = {"heads": heads}
        known.path.write_text(json.dumps(said))
        assert (known.of_layer("key", 1) is not None) is is_known
    assert known.of_layer("other", 1) is None


def test_a_folder_that_cannot_be_written_is_warned_of(own_folder, caplog):
    own_folder.write_text("a file")
    known_patterns.KnownPatterns("model").add("key", [], 1)
    assert "searched again next time" in caplog.text


def test_on_a_gpu_prompts_attend_to_everything_and_it_is_said(caplog):
    with device_called("cuda") as device:
        model = model_on(device, tiny_model("llama"))
        ids = torch.randint(1, 97, (1, 150)).to(device)
        exact = logits(model, "dense", ids)
        assert torch.equal(logits(model, "flexprefill", ids), exact)
    assert "prompts attend to everything" in caplog.text


@pytest.mark.parametrize(("length", "matches"), [(16384, 0), (16385, 2)])
def test_blocks_are_matched_in_long_contexts_alone(length, matches):
    assert minference.matches_at(2, length) == matches


def test_blocks_that_queries_match_are_attended_to_besides(qwen2, monkeypatch):
    ids = torch.randint(1, 97, (2, 500), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(minference, "_PRICED_LENGTH", 250)
    few = {"prefill_budget": 128, "prefill_price": 1.0, "prefill_last": 0}
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
    elsewhere = torch.empty(1, 4, 8, 16, device="meta")
    prompts = [getattr(operator, "prompt_attention", None) for operator in injection.attention_operators()]
    prompts = [each for each in prompts if each is not None]
    assert prompts
    assert not any(prompt._can(step, elsewhere) for prompt in prompts)
    assert [record.getMessage() for record in caplog.records] == [
        "prefill flexprefill is for models on a CPU; on meta prompts attend to everything"
    ]
