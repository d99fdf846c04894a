"""Compiles every Triton kernel for GPUs that need not be there; prints which machine code came out.

Run by test_triton_kernels.py in a process of its own, since the interpreter's tests must not see compiled kernels.
"""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_ops.triton_kernels import gather, merge, rebuild

FLOATS = ("out_a", "out_b", "out", "coefficients", "basis", "cos", "sin")
OTHERS = {"lse_a": "*fp32", "lse_b": "*fp32", "lse": "*fp32", "chunks": "*i64", "where": "*i64", "stored": "*i16"}
# The heads of Llama 3, and ones that are rotated in part.
SHAPES = (
    {"PAIRS": 64, "OFFSET": 0, "INTERLEAVED": False, "BLOCK_PAIRS": 64, "BLOCK_REST": 16},
    {"PAIRS": 16, "OFFSET": 96, "INTERLEAVED": True, "BLOCK_PAIRS": 16, "BLOCK_REST": 128},
)
KERNELS = [
    (merge._merge, {"DIM": 128, "BLOCK_DIM": 128, "BLOCK_ROWS": 32}),
    *(
        (
            rebuild._rebuild,
            {"CHUNK": 8, "RANK": 160, "DIM": 128, "PRECISION": "tf32", "BLOCK_TOKENS": 32, "BLOCK_RANK": 32, **shape},
        )
        for shape in SHAPES
    ),
    (gather._gather, {"BLOCK": 1024}),
]


def compiled(kernel: triton.JITFunction, constants: dict[str, object], capability: int, number: str) -> str:
    """The kind of machine code of one kernel, for a GPU of this compute capability and pointers to this number type."""
    names = kernel.arg_names
    floats = dict.fromkeys(FLOATS, "*i16" if kernel is gather._gather else f"*{number}")
    kinds = {**floats, **OTHERS, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
    return "machine code" if code.get("cubin") else "none"


if __name__ == "__main__":
    print(
        json.dumps(
            {
                f"{kernel.__name__}, sm_{capability}, {number}": compiled(kernel, constants, capability, number)
                for kernel, constants in KERNELS
                for capability, number in ((80, "bf16"), (90, "fp16"))
            }
        )
    )
