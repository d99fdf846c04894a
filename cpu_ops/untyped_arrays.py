"""Untyped arrays: one kernel passes pools of any storage type to typed kernels.

A kernel that only forwards pools is compiled once for all storage types. It takes the memory as bytes. `items_of` turns
these into an array with a shape and strides in items, which a typed kernel called by address accepts as an array of its
type. `UNTYPED` is the variant's name in such calls.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

UNTYPED = "uint8"
"""The variant's name for one untyped array; `UNTYPED_POOL` is that for keys and values."""
UNTYPED_POOL = "uint8,uint8"


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns a view of a C-contiguous array [..., n] as [..., n * itemsize] uint8."""
    return array.view(np.uint8)


@intrinsic
def items_of(typingctx, array, itemsize):
    """Returns a view of bytes [..., n * itemsize] as [..., n] items of `itemsize` bytes.

    The caller may reshape the view and pass it to kernels by address, but must not read its elements.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        found = cgutils.create_struct_proxy(array)(context, builder, operands[0])
        shape, strides = (cgutils.unpack_tuple(builder, each, array.ndim) for each in (found.shape, found.strides))
        shape[-1], strides[-1] = builder.sdiv(shape[-1], operands[1]), operands[1]
        found.shape, found.strides = (cgutils.pack_array(builder, each) for each in (shape, strides))
        found.nitems, found.itemsize = builder.sdiv(found.nitems, operands[1]), operands[1]
        context.nrt.incref(builder, array, operands[0])
        return found._getvalue()

    return array(array, types.int64), codegen
