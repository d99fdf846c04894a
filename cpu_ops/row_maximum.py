"""The largest number of a row, by independent chains of comparisons; LLVM compiles a plain loop to a single chain."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from hetero_kv.cpu_ops.vectors import Vectors, integer, offset

_LANES, _CHAINS = 16, 4


@intrinsic
def _largest(typingctx, rows, g, count):
    """Returns the largest of rows[g, :count], count a multiple of `_LANES`; -inf for count 0. NaN is ignored."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v, array = Vectors(builder, _LANES), make_array(rows)(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, array.strides)[0]
        address = builder.add(builder.ptrtoint(array.data, ir.IntType(64)), builder.mul(arguments[1], stride))
        row = builder.inttoptr(address, array.data.type)
        chains = v.slots([v.constant(float("-inf"))] * _CHAINS)
        for chain in chains:
            builder.store(v.constant(float("-inf")), chain)

        def compare(chain: ir.Value, at: ir.Value) -> None:
            builder.store(v.maximum(v.load(offset(builder, row, at)), builder.load(chain)), chain)

        step = _LANES * _CHAINS
        whole = builder.mul(builder.sdiv(arguments[2], integer(step)), integer(step))
        with cgutils.for_range_slice(builder, integer(0), whole, integer(step)) as (at, _):
            for number, chain in enumerate(chains):
                compare(chain, builder.add(at, integer(number * _LANES)))
        with cgutils.for_range_slice(builder, whole, arguments[2], integer(_LANES)) as (at, _):
            compare(chains[0], at)
        found = builder.load(chains[0])
        for chain in chains[1:]:
            found = v.maximum(found, builder.load(chain))
        for distance in (8, 4, 2, 1):
            found = v.maximum(found, v.across(found, distance))
        return builder.extract_element(found, integer(0))

    return types.float32(rows, types.int64, types.int64), codegen


@njit(error_model="numpy")
def row_max(scores, g, count):
    """Returns the largest of scores[g, :count], float32 with contiguous rows; -inf for count 0. NaN is ignored."""
    whole = count // _LANES * _LANES
    most: np.float32 = _largest(scores, g, whole)
    for t in range(whole, count):
        most = max(most, scores[g, t])
    return most
