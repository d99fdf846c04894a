"""HeteroCaches of a test's layers, without a model: tokens are stored as by a model's forward."""

from __future__ import annotations

from contextlib import contextmanager
from threading import RLock

from torch import nn
from transformers.cache_utils import DynamicLayer

from hetero_kv import HeteroCache
from hetero_kv.engine.store import Store

CAPACITY = 40


class Maker:
    """Stands for an injection: which layers there are, and that everything fits."""

    def __init__(self, *layers, capacity=CAPACITY):
        self.layers, self.capacity = layers, capacity
        self.one_at_a_time = RLock()

    def max_seq_len(self, requested, batch, forks, resident):
        return self.capacity if requested is None else requested

    def planned_store(self, requested, batch, forks, resident, own):
        return Store(self.max_seq_len(requested, batch, forks, resident), forks)

    def state(self):
        return self

    def adapters(self):
        return ()

    def is_like(self, other):
        return True

    def cache_layers(self):
        return [layer() for layer in self.layers]


def new_cache(*layers, capacity=CAPACITY, **settings):
    """A cache whose layers are made by `layers`, functions without arguments."""
    model = nn.Module()
    model.hetero_kv_injection = Maker(*layers, capacity=capacity)
    return HeteroCache(model, **settings)


@contextmanager
def forward(cache, batch, tokens, is_decode=None):
    """A step of `tokens` tokens of every row."""
    with cache.forward(cache.plan_batch([tokens] * batch, tokens), is_decode=is_decode) as passing:
        (step,) = passing.steps
        yield step
    cache.columns = cache.columns.grown(tokens, [tokens] * batch)


def append(cache, keys, values, is_decode=False):
    """Store tokens in every layer, keys [batch, kv_heads, tokens, k_dim] and values, as a prompt or one by one."""
    if not keys.shape[2]:
        return
    with forward(cache, len(keys), keys.shape[2], is_decode) as step:
        for layer in step.group.layers:
            if isinstance(layer, DynamicLayer):
                layer.update(keys, values)
            elif step.is_decode and hasattr(layer, "store_token"):
                blocks = layer.store_token(step, keys, values)
                if layer.window is not None:
                    layer.window.append(keys, values, blocks.finalized * layer.layout.block_size)
            else:
                layer.store(step, keys, values)


def prefill(cache, *chunks):
    """Let chunks of keys [batch, kv_heads, tokens, k_dim], the same for values, pass through a cache of one layer."""
    with forward(cache, len(chunks[0]), sum(chunk.shape[2] for chunk in chunks), is_decode=False) as step:
        (layer,) = step.group.layers
        layer.begin_prefill(step)
        try:
            for chunk in chunks:
                layer.extend(chunk, chunk)
            layer.end_prefill(step)
        finally:
            layer.leave_prefill()
