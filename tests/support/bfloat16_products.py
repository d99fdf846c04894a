"""Products of bfloat16 in Triton's interpreter, which would multiply their integer encodings."""

from __future__ import annotations

from typing import Any

import numpy as np


def mended() -> None:
    """Have the interpreter multiply bfloat16 as the numbers that they are; in this process, for good."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot
    if original.__name__ == "create_dot_of_numbers":
        return

    def number(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot_of_numbers(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return original(self, number(a), number(b), *args)

    InterpreterBuilder.create_dot = create_dot_of_numbers
