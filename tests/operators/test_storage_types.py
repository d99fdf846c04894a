"""With a budget that covers the Context, attention is exact to the storage type's precision, whatever the method.

The reference is the untouched model over a cache whose stored keys and values went through the storage type.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import HeteroKVError
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.store import storage

REPRESENTATIVES = {"MAX": 1, "MEAN": 1, "MEANSTD": 2, "QUEST": 2, "DYNAMIC": 2, "FIXED": 3}
RECIPES = ("dense", "ktransformers", "kvretrieval", "quest", "snapkv", "infllm", "streaming")
# Blocks of 32, the least that Q8_0 and Q4_0 take: ten of them move to the Context in 300 tokens.
KINDS = list(enumerate(itertools.product(REPRESENTATIVES, ["SHARED", "SEPARATE"])))
SMALL = {"block_size": 32, "local_windows_len": 8, "initial_len": 32, "chunk_size": 64, "max_seq_len": 512}
COVERING = {"second_block_count": 500, "preselect_block_count": 500}
_LLAMA = tiny_model("llama", num_hidden_layers=2, head_dim=32)

# Keys that differ in float32's last digits may be rounded to neighbours: a step of the format, in a few places.
PRECISION = {"FP32": 1e-5, "FP16": 1e-4, "BF16": 1e-3, "Q8_0": 1e-3, "Q4_0": 2e-2}


@pytest.fixture
def llama():
    yield _LLAMA
    if getattr(_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_LLAMA)


class StoredLayer(DynamicLayer):
    """A layer of transformers' own cache whose past went through a storage type."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def update(self, key_states, value_states, *args, **kwargs):
        """Prefill attends to new tokens as they are, decoding to all as they are stored; both to a stored past."""
        keys, values = super().update(*(self._stored(new) for new in (key_states, value_states)))
        new = key_states.shape[2]
        if new == 1:
            return keys, values
        past = (tensor[:, :, :-new] for tensor in (keys, values))
        return tuple(torch.cat(pair, dim=2) for pair in zip(past, (key_states, value_states), strict=True))

    def _stored(self, vectors):
        return self.kind.decode(self.kind.encode(vectors)).to(vectors)


def random_tokens(count, seed):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


PROMPT, ANSWER, TURN = random_tokens(45, 1), random_tokens(300, 2), random_tokens(21, 3)
PARTS = [PROMPT, *ANSWER.split(1, dim=1), TURN, *random_tokens(10, 4).split(1, dim=1)]


def logits(cache):
    """Logits of a prompt, 300 tokens after it, and a second turn."""
    with torch.no_grad():
        return torch.cat([_LLAMA(part, past_key_values=cache).logits for part in PARTS], dim=1)


@pytest.fixture(scope="module")
def expected():
    """Logits of the untouched model over stored keys and values, by storage type."""

    def run(kind):
        cache = DynamicCache(config=_LLAMA.config)
        cache.layers = [StoredLayer(kind) for _ in cache.layers]
        return logits(cache)

    return {name: run(storage.get(name)) for name in storage.names()}


def error(actual, wanted):
    return float((actual - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kv_type", storage.names())
@pytest.mark.parametrize(("number", "kind"), KINDS)
def test_every_representative_and_head_mode_is_exact(llama, expected, kv_type, number, kind):
    representative_type, head_select_mode = kind
    every = {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}}
    layer = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    settings = {
        "kv_type": kv_type,
        "representative_type": representative_type,
        "representative_num": REPRESENTATIVES[representative_type],
        "head_select_mode": head_select_mode,
        "preselect_block": number % 3 == 0,
    }
    inject(llama, parse_rules({"rules": [every, layer], "long_context": {**SMALL, **COVERING, **settings}}))
    assert error(logits(HeteroCache(llama)), expected[kv_type]) < PRECISION[kv_type]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kv_type", storage.names())
def test_every_recipe_is_exact(llama, expected, recipe, kv_type):
    inject(llama, recipe, command_line={**SMALL, **COVERING, "kv_type": kv_type})
    assert error(logits(HeteroCache(llama)), expected[kv_type]) < PRECISION[kv_type]


def test_what_a_storage_type_loses_grows_as_its_bytes_shrink(expected):
    lost = {name: error(expected[name], expected["FP32"]) for name in ("FP16", "BF16", "Q8_0", "Q4_0")}
    assert 0 < lost["FP16"] < lost["BF16"] < lost["Q4_0"]
    assert lost["FP16"] < lost["Q8_0"] < lost["Q4_0"]


@pytest.mark.parametrize("kv_type", ["Q8_0", "Q4_0"])
def test_heads_that_a_quantised_type_cannot_hold_are_refused_before_any_token(kv_type):
    model = tiny_model("llama")
    inject(model, "ktransformers", command_line={"kv_type": kv_type, "max_seq_len": 512})
    with pytest.raises(HeteroKVError, match=rf"kv_type {kv_type} stores numbers in groups of 32.*dimension 16; set"):
        HeteroCache(model)
