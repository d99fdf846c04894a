"""The rare steps of the online softmax in AMX kernels: soft-capping, rescaling and the final division.

Scores are [tokens, queries], with queries in the lanes, and output sums have one row per channel of the values, so that
nothing is summed across lanes before the end. The kernels themselves contain the steps that run for every score,
because calling a function for these took a sixth longer.
"""

import numpy as np

from hetero_kv.cpu_ops.amx_tiles import TILE, transpose_words
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LOG2_E, exp2, row_softcap
from hetero_kv.cpu_ops.listed_keys import outgrown


@device_function(forceinline=True, fastmath={"contract", "nsz"}, error_model="numpy")
def cap_products(scores, count, factor, softcap):
    """Turn products of the first `count` tokens into softcap * tanh(product * factor), for exponentials of base two."""
    for t in range(count):
        for i in range(scores.shape[1]):
            scores[t, i] *= factor
        row_softcap(scores, t, scores.shape[1], np.float32(softcap) * LOG2_E)


@device_function(forceinline=True, fastmath={"contract", "nsz"}, error_model="numpy")
def rescale_outgrown(most, at, fresh, factor, totals, rescale, sums, below, v_dim):
    """If a score of fresh has outgrown most[at:], rescale totals[at:] and sums[below : below + v_dim] to fresh.

    fresh: the queries' largest scores so far. most: the scores to which their weights are relative; set to fresh.
    rescale: a buffer of fresh's size.
    """
    if not outgrown(most, at, fresh, factor):
        return
    for i in range(fresh.size):
        rescale[i] = exp2((most[at + i] - fresh[i]) * factor)
        most[at + i] = fresh[i]
        totals[at + i] *= rescale[i]
    for d in range(below, below + v_dim):
        for i in range(fresh.size):
            sums[d, i] *= rescale[i]


@device_function(forceinline=True, fastmath={"contract", "nsz"}, error_model="numpy")
def divide_sums(totals, at, rescale, sums, below, v_dim, transposed):
    """Divide sums[below : below + v_dim] by totals[at:] and write them, transposed, to `transposed`, one row per query.

    sums: [rows, queries]. rescale: a buffer [queries]. transposed: [queries, v_dim rounded up].
    """
    queries = rescale.size
    for i in range(queries):
        rescale[i] = np.float32(1) / totals[at + i]
    for d in range(below, below + v_dim):
        for i in range(queries):
            sums[d, i] *= rescale[i]
    words, transposed_words = sums.view(np.uint32), transposed.view(np.uint32)
    for d in range(0, v_dim, TILE):
        for i in range(0, queries, TILE):
            transpose_words(
                words,
                (below + d) * queries + i,
                queries,
                transposed_words,
                i * transposed.shape[1] + d,
                transposed.shape[1],
            )
