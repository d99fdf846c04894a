"""Arrays of numbers whose type a kernel does not know, because it does no more than hand them to kernels that do.

Such a kernel is compiled once for all storage types. It takes the memory as bytes; `items_of` makes of them what a
kernel called by its address finds as an array of its own type: a shape and strides in items. Where it names that
kernel's variant, `UNTYPED` stands for any numbers.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

UNTYPED = "uint8"
"""Numbers of an array as a kernel sees it that does not know them; as keys and values have numbers, `UNTYPED_POOL`."""
UNTYPED_POOL = "uint8,uint8"


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a C-contiguous array [..., n], [..., n * itemsize] uint8."""
    return array.view(np.uint8)


@intrinsic
def items_of(typingctx, array, itemsize):
    """An array [..., n * itemsize] of bytes as [..., n] of items of so many bytes, whose numbers nobody may read here.

    What was made of it may be reshaped, and passed to kernels by their addresses.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        found = cgutils.create_struct_proxy(array)(context, builder, given[0])
        shape, strides = (cgutils.unpack_tuple(builder, each, array.ndim) for each in (found.shape, found.strides))
        shape[-1], strides[-1] = builder.sdiv(shape[-1], given[1]), given[1]
        found.shape, found.strides = (cgutils.pack_array(builder, each) for each in (shape, strides))
        found.nitems, found.itemsize = builder.sdiv(found.nitems, given[1]), given[1]
        context.nrt.incref(builder, array, given[0])
        return found._getvalue()

    return array(array, types.int64), codegen
