"""Tiny models whose blocks a GPU chooses and attends to: `attend_on: gpu`."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.planning import attention_place
from hetero_kv.planning.read_rates import ReadRates
from tests.support.devices import model_on
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

LAYERS, BLOCK = 2, 8
ALL = 10**6
NO_SETTINGS = MappingProxyType({})
# Settings of which each rule of attention has one.
_CHOOSING = {"representative_type", "chooser"}
#: Recipes and settings under which only the CPU chooses blocks, and what a refusal says of it.
CHOOSE_ON_CPU = [
    ("snapkv", {}, "preselect_block"),
    ("quest", {"token_step": 2}, "token_step"),
    ("loki", {}, "chooser"),
    ("self_extend_quest", {}, "positions are grouped"),
]


def llama_on_gpu(**config):
    """A tiny Llama of two layers in float32 on the simulated GPU."""
    return model_on(torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=LAYERS, **config))


def rules(attend_on="gpu", recipe="quest", cuda_graphs="off", max_seq_len=400, engine=NO_SETTINGS, **kwargs):
    """A recipe with short blocks, the settings of whose attention are these; `engine` has the engine's others."""
    found = small_recipe(recipe, attend_on=attend_on, cuda_graphs=cuda_graphs, max_seq_len=max_seq_len, **engine)
    changed = (
        replace(rule, kwargs={**rule.kwargs, **kwargs}) if _CHOOSING & rule.kwargs.keys() else rule
        for rule in found.rules
    )
    return replace(found, rules=tuple(changed))


#: Settings of `retroinfer`: short blocks of two clusters, few of which are attended to.
CLUSTERS = {
    "recipe": "retroinfer", "block_size": 8, "sink_tokens": 8, "exact_clusters": 0.15, "estimated_clusters": 0.3,
    "dense_layer_num": 0,
}  # fmt: skip


def clusters(attend_on="gpu", **settings):
    """The rules of `retroinfer`, in all layers."""
    return rules(attend_on, **{**CLUSTERS, **settings})


def injected(model, *args, **settings):
    inject(model, rules(*args, **settings))
    return HeteroCache(model)


def rates_given(monkeypatch):
    """What lets `attend_on: split` measure such rates that this share of what is missing comes over the bus."""

    def give(share):
        monkeypatch.setattr(attention_place, "read_rates", lambda *_: ReadRates(1 - share, share))

    return give


def random_tokens(count, rows=1, seed=0):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


def bytes_on_gpu(cache, rows=1):
    """What the layers of a cache have there beside their windows, and what decoded tokens of up to `rows` rows have."""
    tokens = cache.layers[0].group.store.device_tokens
    of_tokens = sum(each.nbytes for (_, _, bucket, _), each in tokens.items() if bucket <= rows)
    return sum(layer.resident.nbytes for layer in cache.layers), of_tokens


@torch.no_grad()
def told(model, cache, tokens, prompt=0):
    """Logits after a prompt of the first `prompt` tokens, and after each of the others."""
    parts = tokens.to("cuda").split([*[prompt] * (prompt > 0), *[1] * (tokens.shape[1] - prompt)], dim=1)
    return [model(part, past_key_values=cache).logits[:, -1].cpu() for part in parts]
