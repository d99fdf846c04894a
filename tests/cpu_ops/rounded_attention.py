"""Softmax attention in float64, and how far a kernel that rounds weights and outputs to bfloat16 may be from it."""

from __future__ import annotations

import torch

UNIT = 2.0**-8
"""Half a unit in the last of bfloat16's 8 bits, relative to the number: what rounding to nearest changes at most."""
FLOAT32_UNIT = 2.0**-24


def attention_and_bound(q, keys, values, seen, scale, softcap=0.0):
    """Attention, its log-sum-exp, and for each number of the attention what a kernel may be off by.

    q: [batch, heads, n, k_dim], keys: [batch, kv_heads, tokens, k_dim], values: [batch, kv_heads, tokens, v_dim], all
    exact numbers of bfloat16. seen: bool, broadcasts to [batch, heads, n, tokens].

    The kernel computes out = round(sum_j round(w_j) v_j / sum_j w_j). A weight is rounded relative to itself, so the
    quotient is off by at most UNIT * sum_j p_j |v_j| with p = softmax(scores): that sum is below 1 for averages of many
    tokens and as large as |v_j| where one token has all the weight. Rounding the quotient adds UNIT * |out|.
    Sums in float32 add less: a score's error d_j, k_dim roundings of products' sums and 4 of what is done to a score
    (Higham 2002, equation 3.5), changes p_j by the factor 1 + d_j in numerator and denominator; each of these sums has
    `tokens` roundings; powers of two are off by 5e-6 (`exponential.COARSE_COEFFICIENTS`), and by 3e-7 whenever sums are
    rescaled.
    """
    q, group = q.double(), q.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = q @ keys.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    p = scores.softmax(-1)
    out, lse = p @ values, scores.logsumexp(-1)
    magnitude = p @ values.abs()
    largest = scores.masked_fill(~seen, 0.0).abs().amax(-1, keepdim=True)
    score_error = FLOAT32_UNIT * (q.shape[-1] * scale * q.abs() @ keys.abs().transpose(-1, -2) + 4 * largest)
    shifted = p * score_error
    relative = UNIT + 2 * seen.shape[-1] * FLOAT32_UNIT + 1e-5
    first_order = relative * magnitude + UNIT * out.abs()
    first_order += shifted @ values.abs() + shifted.sum(-1, keepdim=True) * out.abs()
    return out, lse, first_order * (1 + 2 * UNIT)
