"""With a budget that covers the Context, attention is exact to the storage type's precision, whatever the method.

The reference is the untouched model over a cache whose stored keys and values went through the storage type.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.store import storage
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

REPRESENTATIVES = {"MAX": 1, "MEAN": 1, "MEANSTD": 2, "QUEST": 2, "DYNAMIC": 2, "FIXED": 3}
RECIPES = ("dense", "ktransformers", "kvretrieval", "quest", "snapkv", "infllm", "streaming")
# Blocks of 32: six of them move to the Context in 200 tokens.
KINDS = list(enumerate(itertools.product(REPRESENTATIVES, ["SHARED", "SEPARATE"])))
SMALL = {"block_size": 32, "local_windows_len": 8, "sink_tokens": 32, "chunk_size": 64, "max_seq_len": 512}
TYPES = ("key_type", "value_type")
COVERING = {"top_k_blocks": 500, "preselect_block_count": 500}
_LLAMA = tiny_model("llama", num_hidden_layers=2, head_dim=32)

# Keys that differ in float32's last digits may be rounded to neighbours: a step of the format, in a few places.
PRECISION = {"FP32": 1e-5, "FP16": 1e-4, "BF16": 1e-3, "Q8_0": 1e-3, "Q4_0": 2e-2}
#: Keys of one type, values of another: both stored by the kernel, and neither.
MIXED = {("FP16", "FP32"): 1e-4, ("Q8_0", "Q4_0"): 2e-2}


@pytest.fixture
def llama():
    yield _LLAMA
    if getattr(_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_LLAMA)


class StoredLayer(DynamicLayer):
    """A layer of transformers' own cache whose past went through a storage type."""

    def __init__(self, key_kind, value_kind):
        super().__init__()
        self.kinds = key_kind, value_kind

    def update(self, key_states, value_states, *args, **kwargs):
        """Prefill attends to unrounded new tokens, decoding to stored ones; both to a stored past."""
        new_parts = zip(self.kinds, (key_states, value_states), strict=True)
        keys, values = super().update(*(kind.decode(kind.encode(new)).to(new) for kind, new in new_parts))
        new = key_states.shape[2]
        if new == 1:
            return keys, values
        past = (tensor[:, :, :-new] for tensor in (keys, values))
        return tuple(torch.cat(pair, dim=2) for pair in zip(past, (key_states, value_states), strict=True))


def random_tokens(count, seed):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


# A block and more are generated, and join the Context one by one.
PROMPT, ANSWER, TURN = random_tokens(115, 1), random_tokens(40, 2), random_tokens(21, 3)
PARTS = [PROMPT, *ANSWER.split(1, dim=1), TURN, *random_tokens(10, 4).split(1, dim=1)]


def logits(cache):
    """Logits of a prompt, 200 tokens after it, and a second turn."""
    with torch.no_grad():
        return torch.cat([_LLAMA(part, past_key_values=cache).logits for part in PARTS], dim=1)


@pytest.fixture(scope="module")
def expected():
    """Logits of the untouched model over stored keys and values, by storage type, or by those of keys and of values."""

    def run(*kinds):
        cache = DynamicCache(config=_LLAMA.config)
        cache.layers = [StoredLayer(*map(storage.get, kinds)) for _ in cache.layers]
        return logits(cache)

    return {name: run(name, name) for name in storage.names()} | {pair: run(*pair) for pair in MIXED}


def error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


# Every representative, both head modes and every type.
_EXACT = [(kind, kv_type) for kind in KINDS for kv_type in storage.names()]
# Float32, and means with deviations, are in test_estimates.py; their kernels for such heads are compiled here alone.
_QUICK = {(0, "FP16"), (3, "Q8_0"), (6, "Q8_0"), (9, "Q4_0"), (10, "FP16")}


@pytest.mark.parametrize(
    ("number_and_kind", "kv_type"),
    with_slow(_EXACT, slow=[(kind, kv_type) for kind, kv_type in _EXACT if (kind[0], kv_type) not in _QUICK]),
)
def test_every_representative_and_head_mode_is_exact(llama, expected, number_and_kind, kv_type):
    number, (representative_type, head_select_mode) = number_and_kind
    every = {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}}
    layer = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    settings = {
        "kv_type": kv_type,
        "representative_type": representative_type,
        "representative_num": REPRESENTATIVES[representative_type],
        "head_select_mode": head_select_mode,
        "preselect_block": number % 3 == 0,
        "key_offset": "none",
    }
    inject(llama, parse_rules({"rules": [every, layer], "long_context": {**SMALL, **COVERING, **settings}}))
    assert error(logits(HeteroCache(llama)), expected[kv_type]) < PRECISION[kv_type]


@pytest.mark.parametrize(
    ("recipe", "kv_type"),
    with_slow(
        list(itertools.product(RECIPES, storage.names())),
        slow={*itertools.product(RECIPES, storage.names())}
        - {("dense", "FP16"), ("quest", "Q8_0"), ("snapkv", "Q4_0")},
    ),
)
def test_every_recipe_is_exact(llama, expected, recipe, kv_type):
    inject(llama, recipe, command_line={**SMALL, **COVERING, "kv_type": kv_type, "key_offset": "none"})
    assert error(logits(HeteroCache(llama)), expected[kv_type]) < PRECISION[kv_type]


# The other recipe's kernels for such blocks: test_estimates.py.
@pytest.mark.parametrize(
    ("recipe", "kv_type"),
    with_slow(
        list(itertools.product(["quest", "adaptive"], ["Q8_0", "Q4_0"])),
        slow=[("quest", "Q8_0"), ("adaptive", "Q8_0"), ("adaptive", "Q4_0")],
    ),
)
def test_blocks_of_16_tokens_the_least_that_few_bits_take_are_exact(llama, expected, recipe, kv_type):
    blocks = {**SMALL, "block_size": 16, "sink_tokens": 16, "top_k_blocks": 500}
    inject(llama, recipe, command_line={**blocks, "kv_type": kv_type, "key_offset": "none"})
    assert error(logits(HeteroCache(llama)), expected[kv_type]) < PRECISION[kv_type]


# The kernels of the other pair: tests/cpu_ops.
@pytest.mark.parametrize(
    "pair", [pytest.param(each, marks=() if "FP16" in each else pytest.mark.slow) for each in MIXED]
)
def test_keys_of_one_type_and_values_of_another_are_exact(llama, expected, pair):
    types = {"kv_type": pair[1], "key_type": pair[0]} if pair[0] == "FP16" else dict(zip(TYPES, pair, strict=True))
    inject(llama, "ktransformers", command_line={**SMALL, **COVERING, "preselect_block": True, **types})
    assert error(logits(HeteroCache(llama)), expected[pair]) < MIXED[pair]


@pytest.mark.parametrize(
    "representative_type", with_slow(["MAX", "MEAN", "MEANSTD", "QUEST"], slow=["MAX", "MEAN", "MEANSTD"])
)
def test_representatives_of_eight_bits_are_exact_too(llama, expected, representative_type):
    kinds = {"kv_type": "FP32", "representative_storage": "Q8_0", "representative_type": representative_type}
    counts = {"representative_num": REPRESENTATIVES[representative_type], "preselect_block": True}
    inject(llama, "ktransformers", command_line={**SMALL, **COVERING, **kinds, **counts})
    assert error(logits(HeteroCache(llama)), expected["FP32"]) < PRECISION["FP32"]


def test_representatives_that_groups_of_32_do_not_divide_keep_half_precision():
    settings = RetrievalSettings(representative_storage="Q8_0")
    assert settings.representative_kind(64, 96).name == "Q8_0"
    assert settings.representative_kind(64, 80).name == settings.representative_kind(16, 64).name == "FP16"


# The kernels for them: tests/cpu_ops. In a model: the next test.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ktransformers", "quest"])
def test_keys_that_differ_from_their_blocks_mean_are_exact(llama, expected, recipe):
    types = {"kv_type": "FP32", "key_offset": "block_mean"}
    inject(llama, recipe, command_line={**SMALL, **COVERING, **types})
    assert error(logits(HeteroCache(llama)), expected["FP32"]) < PRECISION["FP32"]


def test_few_bits_hold_keys_with_large_biases_where_their_mean_is_taken_off():
    model = tiny_model("qwen2", num_hidden_layers=1, hidden_size=128)
    # Of channels that hardly turn with the position, as the biases of Qwen2.5's keys are.
    model.model.layers[0].self_attn.k_proj.bias.data.unflatten(0, (2, 2, 16))[:, :, 13:] += 30
    tokens, found = torch.cat([PROMPT, ANSWER[:, :30]], dim=1), {}
    with torch.no_grad():
        exact = model(tokens).logits
        for offset in ("none", "auto"):
            types = {"kv_type": "Q4_0", "key_offset": offset}
            inject(model, "dense", command_line={**SMALL, **types})
            cache = HeteroCache(model)
            parts = [model(part, past_key_values=cache).logits for part in tokens.split([80, *(1,) * 65], dim=1)]
            found[offset] = float((torch.cat(parts, dim=1) - exact)[:, 80:].norm() / exact[:, 80:].norm())
            eject(model)
    assert found["auto"] < found["none"] / 2


@pytest.mark.parametrize(("number", "refused"), [("k_proj", "key_type FP16"), ("v_proj", None)])
def test_a_number_is_refused_that_its_own_type_does_not_hold(number, refused):
    model = tiny_model("llama", num_hidden_layers=1, head_dim=32)
    inject(model, "ktransformers", command_line={"key_type": "FP16", "value_type": "FP32", "max_seq_len": 512})
    for tokens in (PROMPT, PROMPT[:, :1]):
        cache = HeteroCache(model)
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
            weight = getattr(model.model.layers[0].self_attn, number).weight
            weight.mul_(1e7)
            if refused is None:
                model(tokens, past_key_values=cache)
            else:
                with pytest.raises(
                    HeteroKVError,
                    match=f"exceeds the range of {refused}, whose largest value is 65504; set {refused[:8]} to",
                ):
                    model(tokens, past_key_values=cache)
            weight.div_(1e7)


def test_a_storage_types_error_grows_as_its_bytes_shrink(expected):
    lost = {name: error(expected[name], expected["FP32"]) for name in ("FP16", "BF16", "Q8_0", "Q4_0")}
    assert 0 < lost["FP16"] < lost["BF16"] < lost["Q4_0"]
    assert lost["FP16"] < lost["Q8_0"] < lost["Q4_0"]


@pytest.mark.parametrize("kv_type", ["Q8_0", "Q4_0"])
def test_heads_that_a_quantized_type_cannot_hold_are_refused_before_any_token(kv_type):
    model = tiny_model("llama")
    inject(model, "ktransformers", command_line={"kv_type": kv_type, "max_seq_len": 512})
    with pytest.raises(HeteroKVError, match=rf"kv_type {kv_type} stores numbers in groups of 32.*dimension 16; set"):
        HeteroCache(model)
