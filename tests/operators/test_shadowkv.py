"""ShadowKV in whole models: exact at full rank with a covering budget, and what its definition says below that."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model
from transformers import DynamicCache

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import HeteroKVError
from hetero_kv.kv.cache import undo_on_error
from hetero_kv.kv.low_rank_layer import LowRankLayer
from hetero_kv.operators import RetrievalAttention, ShadowKVAttention, SlidingWindowAttention
from hetero_kv.operators.bridge import UnsupportedModelError
from hetero_kv.rules import parse_rules

#: Full rank of the tiny models, and everything attended.
COVERING = {
    "rank": 32,
    "landmark_chunk_size": 4,
    "outlier_chunks": 3,
    "local_chunks": 2,
    "sparse_budget": "all",
    "value_type": "FP32",
}
FULL_RANK = {"deepseek_v3": 96, "gpt_neox": 64}
CHUNKED = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
_models = {}


def shadowkv_in(pattern, settings):
    return {"match": {"name": pattern}, "replace": {"class": "ShadowKVAttention", "kwargs": settings}}


def injected(model, *rules, max_seq_len=512, **settings):
    """The model with ShadowKV where no other rule is, and a new cache."""
    settings = {**COVERING, **settings}
    everywhere = shadowkv_in(r"(self_attn|attention)$", settings)
    long_context = {"chunk_size": 16, "max_seq_len": max_seq_len}
    inject(model, parse_rules({"rules": [*rules, CHUNKED, everywhere], "long_context": long_context}))
    return HeteroCache(model)


def model_of(architecture):
    # 128 channels per head would be a full rank of 256.
    small = {"head_dim": 16} if architecture == "internlm3" else {}
    if architecture not in _models:
        _models[architecture] = tiny_model(architecture, **small)
    return _models[architecture]


@pytest.fixture
def llama():
    model = model_of("llama")
    yield model
    if getattr(model, "hetero_kv_injection", None) is not None:
        eject(model)


def random_tokens(count, seed=0, batch=1):
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def logits(model, cache, *parts):
    """Logits of prompts and single tokens, one after the other."""
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def conversation(prompt, answer, turn, again, batch=1):
    """Two turns: a prompt, tokens one by one, a prompt, tokens one by one."""
    counts = (prompt, answer, turn, again)
    first, generated, second, more = (random_tokens(n, seed, batch) for seed, n in enumerate(counts, start=1))
    return [first, *generated.split(1, dim=1), second, *more.split(1, dim=1)]


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def error_of(model, parts, **settings):
    """Relative error of the logits against the untouched model's, and the cache."""
    with torch.no_grad():
        expected = model(torch.cat(parts, dim=1)).logits
    cache = injected(model, **settings)
    try:
        actual = logits(model, cache, *parts)
    finally:
        eject(model)
    return relative_error(actual, expected), cache


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_full_rank_and_a_covering_budget_are_full_attention_over_two_turns(architecture):
    plus = len(architecture) % 2 == 0
    rank = FULL_RANK.get(architecture, 32)
    model = model_of(architecture)
    parts = conversation(120, 25, 21, 6, batch=2)
    error, cache = error_of(model, parts, rank=rank, project_generated=plus)
    assert error < 2e-5
    layers = [layer for layer in cache.layers if isinstance(layer, LowRankLayer)]
    assert layers
    assert all(layer.context.length >= 144 and layer.state.hit_rate > 0.5 for layer in layers)


@pytest.mark.parametrize("architecture", ["llama", "glm", "smollm3"])
@pytest.mark.parametrize("plus", [False, True])
def test_it_stays_exact_over_300_generated_tokens_and_a_second_turn(architecture, plus):
    parts = conversation(61, 300, 30, 5)
    error, cache = error_of(model_of(architecture), parts, project_generated=plus)
    assert error < 2e-5
    assert cache.get_seq_length() == 396


@pytest.mark.parametrize("scaling", ["yarn", "llama3"])
def test_scaled_rotations_are_undone_too(scaling):
    rope = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=256)
    error, _ = error_of(model, conversation(90, 12, 20, 3))
    assert error < 2e-5


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
@pytest.mark.parametrize("plus", [False, True])
def test_keys_are_rebuilt_with_the_rotation_they_were_stored_with_where_it_changes_as_a_sequence_grows(scaling, plus):
    def new_model():
        # Their rotary modules keep what the longest sequence so far made of them, so that each side needs its own.
        if scaling == "dynamic":
            rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
            return tiny_model("llama", rope_parameters=rope, max_position_embeddings=64)
        factors = {"short_factor": [1 + i / 10 for i in range(8)], "long_factor": [2 + i / 3 for i in range(8)]}
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
        return tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)

    # Past 64 tokens, the length that both change at, while an answer is generated.
    parts = conversation(50, 30, 40, 5)
    cached, whole, ours = new_model(), new_model(), new_model()
    expected = logits(cached, DynamicCache(config=cached.config), *parts)
    actual = logits(ours, injected(ours, project_generated=plus), *parts)
    assert relative_error(actual, expected) < 2e-5
    # One forward over everything turns all keys alike, which no cache does.
    assert relative_error(logits(whole, None, torch.cat(parts, dim=1)), expected) > 0.1


def test_half_precision_models_agree_to_their_precision():
    model = copy.deepcopy(model_of("llama")).bfloat16()
    parts = conversation(120, 20, 20, 5)
    with torch.no_grad():
        expected = logits(model, DynamicCache(config=model.config), *parts)
    actual = logits(model, injected(model, value_type="BF16"), *parts)
    assert relative_error(actual, expected) < 0.05


@pytest.mark.parametrize(("value_type", "tolerance"), [("FP16", 5e-3), ("Q8_0", 5e-2)])
def test_values_are_exact_to_their_storage_type(value_type, tolerance):
    # Groups of 32 need heads of 32 channels.
    model = tiny_model("llama", head_dim=32)
    error, _ = error_of(model, conversation(90, 20, 20, 5), rank=64, value_type=value_type)
    assert 1e-6 < error < tolerance


def recorded(monkeypatch):
    """A list that fills with (operator, layer, call, output) of every decode step."""
    record = []
    decode_step = ShadowKVAttention.decode_step

    def kept(self, layer, call):
        out = decode_step(self, layer, call)
        record.append((self, layer, call, out))
        return out

    monkeypatch.setattr(ShadowKVAttention, "decode_step", kept)
    return record


@pytest.mark.parametrize("plus", [False, True])
def test_a_step_attends_to_outliers_chosen_and_recent_tokens_by_the_keys_of_rank_r(llama, monkeypatch, plus):
    record = recorded(monkeypatch)
    cache = injected(llama, rank=9, sparse_budget=20, project_generated=plus)
    logits(llama, cache, random_tokens(150, 1, batch=2))
    for token in random_tokens(23, 2, batch=2).split(1, dim=1):
        record.clear()
        logits(llama, cache, token)
        for operator, layer, call, out in record:
            keys, values = call.k.new_empty(2, 2, 0, 16), None
            keys, values = (part.new_empty(2, 2, layer.stored_length, 16) for part in (call.k, call.v))
            layer.load(keys, values)
            outliers, chosen = layer.context.outliers, operator.chosen(layer, call)
            assert chosen.shape[2] == 5
            attended = torch.zeros(2, 2, layer.chunks, dtype=torch.bool)
            attended.scatter_(2, torch.cat([outliers.ids, chosen], dim=2), True)
            seen = attended.repeat_interleave(4, dim=2)
            seen = torch.nn.functional.pad(seen, (0, layer.stored_length - layer.context.length), value=True)
            assert (seen.sum(dim=2) == 20 + 12 + len(layer.recent_keys)).all()
            scores = call.q.unflatten(1, (2, 2))[:, :, :, 0] @ keys.transpose(2, 3) * call.scale
            expected = scores.masked_fill(~seen[:, :, None], float("-inf")).softmax(dim=-1) @ values
            torch.testing.assert_close(out[:, :, 0], expected.flatten(1, 2), rtol=1e-4, atol=1e-5)


def test_outliers_and_recent_tokens_have_exact_keys_and_the_others_the_best_of_their_rank(llama):
    prompt, rank = random_tokens(200, 3), 9
    cache = injected(llama, rank=rank)
    logits(llama, cache, prompt)
    covering = HeteroCache(llama)
    for layer in covering.layers:
        layer.settings = layer.settings.__class__(**{**COVERING, "local_chunks": 100})
    logits(llama, covering, prompt)
    for layer, exact in zip(cache.layers, covering.layers, strict=True):
        keys, values = torch.empty(1, 2, 200, 16), torch.empty(1, 2, 200, 16)
        layer.load(keys, values)
        true, end = exact.recent_keys.entries, layer.context.length
        assert torch.equal(values, exact.recent_values.entries)
        assert torch.equal(keys[:, :, end:], true[:, :, end:])
        is_outlier = torch.zeros(1, 2, layer.chunks, dtype=torch.bool).scatter_(2, layer.context.outliers.ids, True)
        is_outlier = is_outlier.repeat_interleave(4, dim=2)
        assert torch.equal(keys[:, :, :end][is_outlier], true[:, :, :end][is_outlier])
        # Rotation keeps norms, so that the error of the rotated keys is that of the factored ones.
        rebuilt = layer.factors.keys_between(0, end)
        table = layer.factors.rotary
        angle = torch.atan2(table.sin, table.cos)[:end]
        pairs = torch.complex(true[0, :, :end, :8].double(), true[0, :, :end, 8:].double())
        plain = torch.view_as_real(pairs * torch.exp(-1j * angle.double()))
        singular_values = torch.linalg.svdvals(plain.transpose(0, 1).flatten(1))
        least = singular_values[rank:].square().sum().sqrt()
        assert float((rebuilt - true[:, :, :end]).double().norm()) == pytest.approx(float(least), rel=1e-3)


def test_a_share_of_the_sequence_is_counted_in_whole_chunks_and_stays_for_the_answer(llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(llama, sparse_budget=0.1, outlier_chunks=0, project_generated=True)
    logits(llama, cache, random_tokens(150), *random_tokens(40, 1).split(1, dim=1))
    assert {layer.context.outliers.residents.ids.shape[2] for _, layer, _, _ in record} == {4}


def test_a_short_sequence_is_kept_exactly_and_has_no_factors(llama):
    cache = injected(llama, rank=32, sparse_budget=4)
    parts = [random_tokens(38, 1), *random_tokens(30, 2).split(1, dim=1)]
    actual = logits(llama, cache, *parts)
    assert all(layer.factors.basis is None and layer.state.hit_rate is None for layer in cache.layers)
    eject(llama)
    with torch.no_grad():
        assert relative_error(actual, llama(torch.cat(parts, dim=1)).logits) < 1e-5


def test_generated_tokens_stay_exact_or_are_projected_as_they_leave_the_local_chunks(llama):
    lengths = {}
    for plus in (False, True):
        cache = injected(llama, rank=16, project_generated=plus)
        logits(llama, cache, random_tokens(100), *random_tokens(41, 1).split(1, dim=1))
        lengths[plus] = [(layer.context.length, len(layer.recent_keys)) for layer in cache.layers]
        eject(llama)
    # (100 // 4 - 2) * 4, and (141 // 4 - 2) * 4.
    assert lengths[False] == [(92, 49)] * 3
    assert lengths[True] == [(132, 9)] * 3


def test_a_turn_that_the_subspace_does_not_hold_is_factored_anew_past_the_setting(llama):
    factored, shares = [], []
    for limit in (0.0, 1.0):
        cache = injected(llama, rank=6, refactor_above=limit)
        logits(llama, cache, random_tokens(100))
        first = [layer.state.energy_outside for layer in cache.layers]
        logits(llama, cache, random_tokens(100, 1))
        factored.append([layer.state.factored for layer in cache.layers])
        shares.append([layer.state.energy_outside for layer in cache.layers])
        assert all(0 < share < 1 for share in first)
        eject(llama)
    assert factored == [[2] * 3, [1] * 3]
    # A basis that knows the new keys holds more of them than one that does not.
    assert sum(shares[0]) < sum(shares[1])


def test_statistics_of_a_cache_say_how_its_layers_fare(llama):
    cache = injected(llama, sparse_budget=8, rank=16)
    logits(llama, cache, random_tokens(150), *random_tokens(20, 1).split(1, dim=1))
    assert all(0 <= rate <= 1 for rate in cache.chunk_hit_rate)
    assert all(0 < share < 1 for share in cache.key_energy_outside)
    again = HeteroCache(llama)
    logits(llama, again, random_tokens(150), *([random_tokens(1, 5)] * 2))
    assert again.chunk_hit_rate != cache.chunk_hit_rate
    assert again.block_recall == [None] * 3


def test_recall_grows_with_the_budget_up_to_one(llama):
    recalls = []
    for budget in (4, 16, 64, "all"):
        settings = {**COVERING, "sparse_budget": budget}
        rules = parse_rules({"rules": [CHUNKED, shadowkv_in("self_attn$", settings)]})
        inject(llama, rules, command_line={"measure_recall": True, "max_seq_len": 256})
        cache = HeteroCache(llama)
        logits(llama, cache, random_tokens(150), random_tokens(1, 1))
        recalls.append(cache.block_recall[0])
        eject(llama)
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.999
    assert recalls[-1] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("plus", [False, True])
def test_going_back_after_a_failure_leaves_no_trace(llama, plus):
    settings = {"rank": 9, "sparse_budget": 12, "project_generated": plus, "refactor_above": 0.0}
    start = [random_tokens(100, 1), *random_tokens(9, 2).split(1, dim=1)]
    lost = [*random_tokens(14, 3).split(1, dim=1), random_tokens(40, 4), *random_tokens(6, 5).split(1, dim=1)]
    after = [*random_tokens(5, 6).split(1, dim=1), random_tokens(30, 7), *random_tokens(5, 8).split(1, dim=1)]
    cache = injected(llama, **settings)
    logits(llama, cache, *start)

    def failing():
        with undo_on_error(cache):
            logits(llama, cache, *lost)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    other = HeteroCache(llama)
    logits(llama, other, *start)
    assert cache.get_seq_length() == other.get_seq_length() == 109
    assert [layer.state.factored for layer in cache.layers] == [layer.state.factored for layer in other.layers]
    # The same chunks may lie in other slots, which changes the order of sums.
    assert relative_error(logits(llama, cache, *after), logits(llama, other, *after)) < 1e-5


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("back", [3, 25, 90])
def test_cropped_tokens_are_forgotten(llama, plus, back):
    cache = injected(llama, project_generated=plus)
    parts = [random_tokens(120, 1), *random_tokens(20, 2).split(1, dim=1)]
    logits(llama, cache, *parts)
    cache.crop(-back)
    more = [*random_tokens(6, 3).split(1, dim=1), random_tokens(30, 4), *random_tokens(4, 5).split(1, dim=1)]
    actual = logits(llama, cache, *more)
    eject(llama)
    kept = torch.cat(parts, dim=1)[:, :-back]
    with torch.no_grad():
        expected = llama(torch.cat([kept, *more], dim=1)).logits[:, kept.shape[1] :]
    assert relative_error(actual, expected) < 2e-5


def test_forks_go_their_own_ways(llama):
    cache = injected(llama, rank=9, sparse_budget=12, project_generated=True)
    start = [random_tokens(100, 1), *random_tokens(9, 2).split(1, dim=1)]
    ways = [[*random_tokens(15, seed).split(1, dim=1), random_tokens(20, seed + 1)] for seed in (3, 5)]
    logits(llama, cache, *start)
    fork = cache.fork()
    interleaved = [[], []]
    for pair in zip(*ways, strict=True):
        for out, which, part in zip(interleaved, (cache, fork), pair, strict=True):
            out.append(logits(llama, which, part))
    for out, way in zip(interleaved, ways, strict=True):
        alone = HeteroCache(llama)
        logits(llama, alone, *start)
        assert torch.equal(torch.cat(out, dim=1), logits(llama, alone, *way))
    assert fork.shared_bytes > 0


def test_beam_search_equals_the_untouched_models(llama):
    tokens = random_tokens(90, 9)
    beam = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = llama.generate(tokens, past_key_values=DynamicCache(config=llama.config), **beam)
    cache = injected(llama, project_generated=True)
    assert llama.generate(tokens, past_key_values=cache, **beam).tolist() == expected.tolist()


def test_a_reset_cache_begins_anew(llama):
    cache = injected(llama, rank=9, sparse_budget=12)
    parts = conversation(90, 10, 20, 3)
    first = logits(llama, cache, *parts)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(llama, cache, *parts), first)


def test_layers_may_have_different_operators(llama):
    retrieval = {
        "match": {"name": r"layers\.1\.self_attn$"},
        "replace": {"class": "RetrievalAttention", "kwargs": {"block_size": 4, "kv_type": "FP32"}},
    }
    untouched = {"match": {"name": r"layers\.2\.self_attn$"}, "replace": {"class": "default"}}
    parts = conversation(90, 20, 20, 5)
    cache = injected(llama, retrieval, untouched)
    kinds = [type(operator) for operator in llama.hetero_kv_injection.attention_operators()]
    assert kinds == [ShadowKVAttention, RetrievalAttention]
    actual = logits(llama, cache, *parts)
    eject(llama)
    with torch.no_grad():
        assert relative_error(actual, llama(torch.cat(parts, dim=1)).logits) < 2e-5


def test_the_models_own_sliding_windows_keep_theirs():
    model = model_of("gemma3_text")
    injected(model)
    try:
        kinds = [type(operator) for operator in model.hetero_kv_injection.attention_operators()]
    finally:
        eject(model)
    assert kinds == [SlidingWindowAttention, ShadowKVAttention, SlidingWindowAttention]


def test_layers_with_one_rotation_share_its_table_and_others_have_their_own(llama):
    cache = injected(llama)
    logits(llama, cache, random_tokens(90), *random_tokens(5, 1).split(1, dim=1))
    tables = {id(layer.factors.rotary) for layer in cache.layers}
    assert len(tables) == 1
    assert len(cache.layers[0].factors.rotary) == 95


def test_a_model_whose_rotation_is_unknown_is_refused_by_name(llama, monkeypatch):
    cache = injected(llama)
    attention = llama.model.layers[1].self_attn.wrapped
    forward = type(attention).forward

    def reflected(self, *args, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return forward(self, *args, position_embeddings=(cos, -sin), **kwargs)

    monkeypatch.setattr(attention, "forward", reflected.__get__(attention))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn \(LlamaAttention\) rotates its keys"):
        logits(llama, cache, random_tokens(90))
    assert cache.get_seq_length() == 0


def test_sequences_at_different_positions_are_refused(llama):
    cache = injected(llama)
    positions = torch.stack([torch.arange(40), torch.arange(1, 41)])
    with pytest.raises(HeteroKVError, match="different positions"), torch.no_grad():
        llama(random_tokens(40, batch=2), position_ids=positions, past_key_values=cache)


def test_a_rank_above_the_models_channels_says_what_fits(llama):
    with pytest.raises(HeteroKVError, match=r"rank is 33, .* 2 kv heads of 16, 32 channels .* at most 32 .* or to 5 "):
        injected(llama, rank=33)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparse_budget": 3}, "sparse_budget is 3; that is fewer tokens than one chunk of landmark_chunk_size 4"),
        ({"sparse_budget": 1.5}, "sparse_budget is 1.5; as a share of the sequence .* at most 1.0"),
        ({"sparse_budget": 0.0}, "sparse_budget is 0.0; as a share of the sequence it must be above 0"),
        ({"rank": 0}, "rank is 0; it must be a whole number of at least 1"),
        ({"local_chunks": 0}, "local_chunks is 0; it must be a whole number of at least 1"),
        ({"refactor_above": 2}, "refactor_above is 2; it must be a number from 0 to 1"),
        ({"value_type": "FP61"}, "value_type is 'FP61'"),
    ],
)
def test_settings_that_cannot_be_are_refused(llama, settings, message):
    with pytest.raises(HeteroKVError, match=message):
        injected(llama, **settings)


@pytest.mark.parametrize(("recipe", "plus"), [("shadowkv", False), ("shadowkv_plus", True)])
def test_the_recipes_have_the_papers_settings(recipe, plus):
    model = tiny_model("llama", num_key_value_heads=4, head_dim=64)
    inject(model, recipe, command_line={"max_seq_len": 900})
    settings = [operator.settings for operator in model.hetero_kv_injection.attention_operators()]
    paper = {"rank": 160, "landmark_chunk_size": 8, "outlier_chunks": 48, "local_chunks": 4, "sparse_budget": 0.0156}
    assert {name: getattr(settings[0], name) for name in paper} == paper
    assert all(setting.project_generated is plus for setting in settings)
    cache = HeteroCache(model)
    logits(model, cache, random_tokens(600), *random_tokens(12, 1).split(1, dim=1))
    # 612 tokens are 76 chunks, 4 of them local; one in 64 is chosen.
    assert cache.layers[0].chunks == (72 if plus else 71)
    assert cache.layers[0].context.outliers.ids.shape[2] == 48
    assert cache.layers[0].context.outliers.residents.ids.shape[2] == 2
