"""Short turns: a few new tokens attend to a long past in the pool, without copying it."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.causal_attention import attend_blocks_causal
from hetero_kv.engine.step import Step
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.observation import Observation

#: Most tokens of a short turn. A longer prompt loads the past into a buffer, for products of large matrices, and
#: spreads the cost of that over more tokens.
MOST_TOKENS = 64
#: Fewest stored tokens that a short turn follows; copying fewer takes almost no time, once in a prompt.
LEAST_PAST = 1024
# Keys decoded at once.
_KEYS_AT_ONCE = 4096


def is_short(step: Step, call: AttentionCall) -> bool:
    """Whether the call has all tokens of a short turn: few, behind a long past, to be stored, and on the CPU.

    So are parts beside decoded tokens, of any size and behind any past, which each would copy again.
    """
    tokens = call.q.shape[2]
    fits = step.part.is_mixed or (tokens <= MOST_TOKENS and step.past >= LEAST_PAST)
    return fits and tokens == step.tokens and step.stores and call.q.device.type == "cpu"


def store_and_attend(
    layer: RetrievalLayer, step: Step, call: AttentionCall, threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the step's tokens, then attend causally to all stored tokens, the new ones in their stored form too.

    Returns out [batch, heads, tokens, v_dim] and lse [batch, heads, tokens], float32, without a learned sink.
    """
    layer.store(step, call.k, call.v)
    blocks, pool = step.blocks(layer.layout), layer.pool
    assert pool is not None
    if pool.read_ahead is not None:
        pool.read_ahead.request_all()
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    by_group = call.q.float().unflatten(1, (kv_heads, heads // kv_heads)).permute(0, 3, 1, 2, 4)
    ids = blocks.table[:, None]
    counts = np.full(ids.shape[:2], ids.shape[2], dtype=np.int32)
    out, lse = attend_blocks_causal(
        by_group.contiguous().numpy(),
        pool.key_array,
        pool.value_array,
        ids,
        counts,
        blocks.lengths,
        call.scale,
        call.softcap or 0.0,
        threads=threads,
        key_offsets=pool.offset_array,
        in_bfloat16=call.q.dtype == torch.bfloat16,
    )
    return torch.from_numpy(out).flatten(2, 3).transpose(1, 2), torch.from_numpy(lse).flatten(2, 3).transpose(1, 2)


def received_attention(layer: RetrievalLayer, observation: Observation, start: int, length: int) -> torch.Tensor:
    """Attention of the last queries to the stored keys [start, length): [batch, kv_heads, keys] float32.

    `length` tokens are stored, the present step's included; `start` is less.
    """
    pieces = [(first, min(first + _KEYS_AT_ONCE, length)) for first in range(start, length, _KEYS_AT_ONCE)]
    return torch.cat([observation.attention_to(layer.read_keys(*piece), piece[0], length) for piece in pieces], dim=2)
