"""Every recipe with a covering budget equals full attention, in two turns; one token less would show."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import eject, inject
from hetero_kv.families.sparse_prefill import attention, flexprefill, known_patterns, minference
from hetero_kv.families.sparse_prefill.minference import MeasuredPattern, Pattern
from hetero_kv.families.token_retrieval import choosers
from tests.support.slow_variants import with_few, with_slow
from tests.support.small_recipes import RECIPES, new_cache, small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

#: Of the largest logit: what sums in another order may differ by.
ROUNDING = 1e-5

_LAYERS = {"dense_layer_num": 0}
_BLOCKS = {**_LAYERS, "top_k_blocks": 500}
_PRESELECTED = {**_BLOCKS, "preselect_block_count": 500}
_TOKENS = {**_LAYERS, "token_budget": 1.0}
_ENTRIES = {"budget": 500}
_FACTORS = {"rank": 32, "sparse_budget": "all"}
# From a prompt's first chunk on, and to its last query.
_SPARSE = {"prefill_from": 64, "prefill_last": 0}
_PATTERNS = {**_SPARSE, "prefill_budget": 8192, "error_budget": 0.0}

#: Settings under which a method leaves nothing out, and computes what it does otherwise.
COVERING = {
    "adaptive": {"top_k_blocks": 500, "min_blocks": 500},
    "adaptive_lean": {"top_k_blocks": 500, "min_blocks": 500},
    "bigbird": _ENTRIES,
    "cam": _ENTRIES,
    "cascade": _ENTRIES,
    "d2o": _ENTRIES,
    "dense": {},
    "flexprefill": {**_SPARSE, "prefill_mass": 1.0, "prefill_min_budget": 64},
    "h2o": _ENTRIES,
    "infinigen": {**_TOKENS, "alpha": 1e9},
    "infinipot": _ENTRIES,
    "infllm": _BLOCKS,
    "infllm_stream": {"local_windows_len": 500},
    "ktransformers": _BLOCKS,
    "kvretrieval": _PRESELECTED,
    "loki": _TOKENS,
    # A bit tells apart only what lies on opposite sides.
    "magicpig": {**_LAYERS, "hash_bits": 1, "hash_tables": 400},
    "minference": _PATTERNS,
    "pyramidkv": _ENTRIES,
    "quest": _BLOCKS,
    "random": _ENTRIES,
    "retroinfer": {"exact_clusters": 1.0},
    "roco": _ENTRIES,
    "self_extend": {"position_group": 1},
    "self_extend_quest": {**_BLOCKS, "position_group": 1},
    "shadowkv": _FACTORS,
    "shadowkv_minference": {**_FACTORS, **_PATTERNS},
    "shadowkv_plus": _FACTORS,
    "sirllm": _ENTRIES,
    "snapkv": _PRESELECTED,
    "snapkv_evict": _ENTRIES,
    "sparq": _TOKENS,
    "streaming": {"local_windows_len": 500},
    "streaming_llm": _ENTRIES,
    "tova": _ENTRIES,
}
#: Where the small recipe leaves nothing out of as few tokens as here: settings under which it does.
LEAVING_OUT = {
    "flexprefill": {**_SPARSE, "prefill_mass": 0.1, "prefill_min_budget": 64},
    "minference": {**_SPARSE, "prefill_budget": 128, "error_budget": 1.0},
}
#: What others have too: a policy whose budget covers keeps all entries; others with the same operator and settings.
ALIKE = (
    "adaptive_lean", "bigbird", "cam", "infllm", "ktransformers", "loki", "random", "roco", "self_extend_quest",
    "shadowkv_minference", "shadowkv_plus", "snapkv", "snapkv_evict", "streaming", "streaming_llm", "tova",
)  # fmt: skip
#: Of each kind of operator, one whose budget can leave something out.
NOT_COVERING = "cascade", "infinigen", "infllm_stream", "minference", "quest", "self_extend", "shadowkv"
#: Of the recipes in one such model: what others are between them too.
SELDOM_BETWEEN = (
    "adaptive_lean", "bigbird", "cam", "cascade", "d2o", "flexprefill", "infinigen", "infllm", "infllm_stream",
    "kvretrieval", "loki", "minference", "pyramidkv", "quest", "random", "retroinfer", "roco", "self_extend",
    "self_extend_quest", "shadowkv_minference", "shadowkv_plus", "sirllm", "snapkv", "snapkv_evict", "sparq",
    "streaming", "streaming_llm", "tova",
)  # fmt: skip
#: Models with layers that are no attention, every recipe in one and some in each.
BETWEEN_OTHERS = [
    *(("lfm2", recipe) for recipe in COVERING),
    ("bamba", "flexprefill"),
    ("bamba", "infllm_stream"),
    ("granitemoehybrid", "cam"),
    ("granitemoehybrid", "loki"),
    ("jamba", "infinigen"),
    ("qwen3_5_text", "retroinfer"),
    ("qwen3_5_text", "self_extend"),
    ("qwen3_next", "minference"),
    ("qwen3_next", "sparq"),
]
#: A second recipe between the layers of one model; test_a_covering_budget_is_full_attention has the recipe.
SECOND_BETWEEN = [
    ("bamba", "flexprefill"),
    ("granitemoehybrid", "cam"),
    ("qwen3_5_text", "self_extend"),
    ("qwen3_next", "sparq"),
]


def _tokens(count, seed):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


# A prompt of several chunks and strides, an answer in which blocks enter the Context, and a second turn.
PARTS = [_tokens(150, 0), *_tokens(9, 1).split(1, dim=1), _tokens(70, 2), *_tokens(2, 3).split(1, dim=1)]
IDS = torch.cat(PARTS, dim=1)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(autouse=True)
def no_short_cuts(monkeypatch, tmp_path):
    """A chooser runs though it takes all tokens; patterns are this model's, found on the short prompt."""
    for name in choosers.names():
        monkeypatch.setattr(choosers.get(name).implementation, "covers", lambda *_: False)
    monkeypatch.setenv(known_patterns.ENVIRONMENT_VARIABLE, str(tmp_path))
    monkeypatch.setattr(attention, "_SEARCHED_FROM", 2)


def off(model, expected, recipe, settings):
    """How far the logits of a conversation under a recipe are from full attention's, as a share of the largest."""
    inject(model, small_recipe(recipe), command_line=settings)
    try:
        with torch.no_grad():
            if recipe.endswith("minference"):
                # The first prompt attends to everything; its patterns are the next one's.
                model(PARTS[0], past_key_values=new_cache(model))
            cache = new_cache(model)
            found = torch.cat([model(part, past_key_values=cache).logits for part in PARTS], dim=1)
    finally:
        eject(model)
    return float((found - expected).abs().max() / expected.abs().max())


def test_every_recipe_says_what_covers_everything():
    assert sorted(COVERING) == RECIPES


@pytest.mark.parametrize("recipe", with_slow(list(COVERING), slow=ALIKE))
def test_a_covering_budget_is_full_attention(model, expected, recipe):
    assert off(model, expected, recipe, COVERING[recipe]) < ROUNDING


@pytest.mark.parametrize(
    ("architecture", "recipe"),
    with_slow(BETWEEN_OTHERS, slow=[*(("lfm2", recipe) for recipe in SELDOM_BETWEEN), *SECOND_BETWEEN]),
)
def test_a_covering_budget_is_full_attention_between_layers_that_are_none(architecture, recipe):
    model = tiny_model(architecture, max_position_embeddings=1024)
    with torch.no_grad():
        whole = model(IDS).logits
    # States are sums over all tokens, in as many orders.
    assert off(model, whole, recipe, COVERING[recipe]) < 10 * ROUNDING


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern("a_shape", 4096, 0),
        Pattern("a_shape", 0, 4096),
        Pattern("vertical_slash", 4096, 0),
        Pattern("vertical_slash", 0, 4096),
        Pattern("block_sparse", 0, 4096),
    ],
)
def test_every_pattern_of_everything_is_full_attention(model, expected, pattern, monkeypatch):
    only = [MeasuredPattern(pattern, 0.0, 4096.0)]
    monkeypatch.setattr(minference, "measured_patterns", lambda chunk, *_: [only] * chunk.q.shape[1])
    assert off(model, expected, "minference", _SPARSE) < ROUNDING


@pytest.mark.parametrize("threshold", [-1.0, 1.0], ids=["lines", "blocks"])
def test_every_way_to_reach_all_of_the_attention_is_full_attention(model, expected, threshold, monkeypatch):
    monkeypatch.setattr(flexprefill, "NEAR", threshold)
    assert off(model, expected, "flexprefill", COVERING["flexprefill"]) < ROUNDING


@pytest.mark.parametrize("recipe", with_few(sorted({*COVERING} - {"dense"}), NOT_COVERING))
def test_a_budget_that_does_not_cover_is_not(model, expected, recipe):
    assert off(model, expected, recipe, LEAVING_OUT.get(recipe, {})) > 0.1


def test_a_token_that_the_last_step_alone_leaves_out_would_be_seen(expected):
    """Whichever it is, in the untouched model: as good a look as the tests above have at a method."""
    model, past = tiny_model("llama", max_position_embeddings=1024), IDS.shape[1] - 1
    cache = DynamicCache(config=model.config)
    # A row for each token that is left out.
    mask = torch.zeros(past, 1, 1, past + 1).masked_fill(torch.eye(past, past + 1).bool()[:, None, None], -torch.inf)
    with torch.no_grad():
        model(IDS[:, :-1], past_key_values=cache)
        cache.batch_repeat_interleave(past)
        found = model(IDS[:, -1:].expand(past, 1), attention_mask=mask, past_key_values=cache).logits
    away = (found - expected[:, -1:]).abs().amax(dim=(1, 2)) / expected.abs().max()
    assert float(away.min()) > 10 * ROUNDING
