"""Blocks that enter the Context while tokens are decoded: what is derived from them, for all layers at once."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache
from hetero_kv.families.retrieval.representatives import Representing
from tests.operators.retrieval_models import SMALL, injected

pytestmark = pytest.mark.usefixtures("one_thread")

DERIVED = ("representatives", "value_means", "key_codes")
ADAPTIVE = {
    "representative_type": "MEANSTD", "representative_num": 2, "group_reduce": "softmax", "target_mass": 0.9,
    "min_blocks": 2, "top_k_blocks": 4,
}  # fmt: skip
QUEST = {"representative_type": "QUEST", "representative_num": 2, "top_k_blocks": 3}
EVERY = {**SMALL, "block_size": 16, "local_windows_len": 32, "sink_tokens": 16, "kv_type": "FP16"}


@pytest.mark.parametrize("settings", [ADAPTIVE, QUEST, {**QUEST, "local_windows_len": 1}])
@pytest.mark.parametrize("rows", [1, 2])
def test_all_layers_derive_the_same_as_each_alone(llama, monkeypatch, settings, rows):
    injected(llama, **{**EVERY, **settings})
    cache = HeteroCache(llama)
    ids = torch.randint(2, 97, (rows, 80 + 33), generator=torch.Generator().manual_seed(0))
    made, of = [], Representing.__call__
    with torch.no_grad():
        llama(ids[:, :80], past_key_values=cache)
        monkeypatch.setattr(Representing, "__call__", lambda *given: made.append(len(given[1])) or of(*given))
        for token in ids[:, 80:].split(1, dim=1):
            llama(token, past_key_values=cache)
    layers = cache.layers
    entered = layers[0].context_end - layers[0].layout.context_end(80)
    assert entered >= 2
    # Each in one computation for all layers.
    assert made == [len(layers) * rows] * entered
    for layer in layers:
        pool, first = layer.pool, layer.layout.sink_blocks
        kept = {name: array.clone() for name in DERIVED if (array := getattr(pool, name)) is not None}
        for row in range(rows):
            for block in layer.block_ids(row)[first : layer.context_end]:
                one = torch.tensor([int(block)])
                alone = of(layer.vectors_of, pool.decoded_keys(one).float())
                pool.put(one, pool.derived_of({name: pool.arrays[name][one] for name in ("keys", "values")}, alone))
        for name, array in kept.items():
            assert torch.equal(array, getattr(pool, name)), name
