"""How much attention a few queries pay to each token and at each distance: by it lines and slashes are chosen."""

import numpy as np
from numba import njit, types

from cpu_ops.exponential import LOG2_E, row_exp2, row_max, row_softcap

_FLOAT2, _FLOAT1 = types.Array(types.float32, 2, "C"), types.Array(types.float32, 1, "C")
_INT1 = types.Array(types.int64, 1, "C")


@njit(types.Tuple((_FLOAT1, _FLOAT1))(_FLOAT2, types.float32, types.float32), cache=True, nogil=True)
def line_sums(products, scale, softcap):
    """Attention by token and by distance, [tokens] each, of the last queries of a sequence, summed over them.

    products: [queries, tokens] float32, of queries and keys, which are overwritten; the last query is the last token.
    scale and softcap (0: none) as for `prompt_attention.attend_prompt`.
    """
    queries, tokens = products.shape
    by_token, by_place = np.zeros(tokens, np.float32), np.zeros(tokens, np.float32)
    for i in range(queries):
        seen = tokens - queries + i + 1
        if softcap > 0:
            for t in range(seen):
                products[i, t] *= scale / softcap
            row_softcap(products, i, seen, softcap * LOG2_E)
        else:
            for t in range(seen):
                products[i, t] *= scale * LOG2_E
        share = np.float32(1) / row_exp2(products, i, seen, row_max(products, i, seen))
        behind = tokens - seen
        for t in range(seen):
            weight = products[i, t] * share
            by_token[t] += weight
            # The query's own token comes last.
            by_place[behind + t] += weight
    return by_token, by_place[::-1].copy()


@njit(_INT1(_INT1, types.int64, types.int64, types.int64), cache=True, nogil=True)
def distances_within(ranked, block, covered, budget):
    """The first of the ranked distances, as many as let a block of queries see no more than `budget` tokens.

    ranked: distances, best first. block: queries of a block; each sees a key at each of the distances, and the block
    what any of them sees. covered: distances below this are seen anyway, and cost nothing.
    """
    most = np.int64(covered)
    for distance in ranked:
        most = max(most, distance + 1)
    # Tokens by their distance from the block's last query.
    seen = np.zeros(most + block, np.bool_)
    seen[: covered + block - 1] = True
    count = np.int64(0)
    taken = np.empty(ranked.size, np.int64)
    for distance in ranked:
        if distance < covered:
            continue
        added = np.int64(0)
        for at in range(distance, distance + block):
            added += not seen[at]
        if added > budget:
            break
        budget -= added
        seen[distance : distance + block] = True
        taken[count] = distance
        count += 1
    return taken[:count].copy()
