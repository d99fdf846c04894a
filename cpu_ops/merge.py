"""Exact merging of attention to disjoint sets of keys."""

import numpy as np


def merge_partials(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the attention to the union of disjoint sets of keys, from the attention to each set.

    outs: [parts, ..., v_dim] float32, lses: [parts, ...] float32, natural log-sum-exp of each part's scores (-inf for
    a part without keys). Each part is weighted by exp(lse_i - lse), as in Flash-Decoding.

    Returns out [..., v_dim] and lse [...] float32; 0 and -inf where no part has a key. Raises ValueError if the shapes
    do not fit or there is no part.
    """
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or not len(lses):
        raise ValueError(
            f"outs {outs.shape} must be [parts, ..., v_dim] and lses {lses.shape} [parts, ...], parts >= 1"
        )
    most = lses.max(axis=0)
    reference = np.where(np.isneginf(most), np.float32(0), most)
    weights = np.exp(lses - reference)
    total = weights.sum(axis=0)
    out = np.einsum("p...,p...d->...d", weights, outs) / np.maximum(total, np.finfo(np.float32).tiny)[..., None]
    with np.errstate(divide="ignore"):
        lse = reference + np.log(total)
    return out.astype(np.float32, copy=False), lse.astype(np.float32, copy=False)
