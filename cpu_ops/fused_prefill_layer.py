"""A decoder layer's elementwise work on a prompt chunk: residual addition, norms, rotation and the MLP's gate.

Each function passes over its numbers once and rounds to bfloat16 where the model's own steps do: the normalised number,
its product with the weight, the two terms of a rotation and their sum, the activation and the gated value. Numbers are
float32, or the bits of bfloat16 (uint16). The layers have the form described in `cpu_ops.fused_decode_layer`. The
caller computes the matrix products.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.bfloat16_bits import number, rounded
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.gates import activated
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.simd import prefetch
from hetero_kv.cpu_ops.threads import kernel_threads

# Bytes of a prefetch. With so much arithmetic per number the CPU's own prefetching does not look far enough ahead.
_AHEAD = 512


def norm_rows(
    x: np.ndarray, added: np.ndarray | None, weight: np.ndarray, epsilon: float | np.float32, out: np.ndarray,
    threads: int | None = None,
) -> None:  # fmt: skip
    """RMSNorm of each row (Zhang and Sennrich 2019, arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight.

    x: [rows, width], C-contiguous. added: as x, first added to x in place; None: x stays. weight: [width] float32. out:
    as x, the normalised rows are written to it. threads: number of threads (None: Numba's setting).

    Raises ValueError or TypeError for arrays that do not fit together.
    """
    shapes = [each.shape for each in (out, *([] if added is None else [added]))]
    if x.ndim != 2 or weight.shape != x.shape[1:] or any(shape != x.shape for shape in shapes):
        raise ValueError(f"x {x.shape}, weight {weight.shape}, and out and added {shapes} do not fit")
    with kernel_threads(threads) as used:
        arguments = x, x[:0] if added is None else added, weight, float(epsilon), out
        call_region("norm rows", _variant(x), _norm_region(_variant(x)), arguments, used)


def rotate_heads(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, weight: np.ndarray | None = None,
    epsilon: float | np.float32 = 0.0, threads: int | None = None,
) -> None:  # fmt: skip
    """Rotate each head of each row in place: x * cos + rotate_half(x) * sin (Su et al. 2021, arXiv:2104.09864).

    x: [rows, heads * dim], C-contiguous. cos, sin: [positions, dim], of x's type; row r has position r % positions.
    weight: [dim] float32, of an RMSNorm of each head with `epsilon` before the rotation; None: no norm. threads: number
    of threads (None: Numba's setting).

    Raises ValueError or TypeError for arrays that do not fit together.
    """
    dim = cos.shape[-1]
    fits = x.ndim == 2 and cos.shape == sin.shape == (len(cos), dim) and len(cos) > 0 and dim > 0 and dim % 2 == 0
    if not fits or x.shape[1] % dim or len(x) % len(cos) or (weight is not None and weight.shape != (dim,)):
        raise ValueError(f"x {x.shape}, cos {cos.shape} and sin {sin.shape} do not fit")
    with kernel_threads(threads) as used:
        arguments = x, cos, sin, np.empty(0, np.float32) if weight is None else weight, float(epsilon)
        call_region("rotate heads", _variant(x), _rotation_region(_variant(x)), arguments, used)


def gate_rows(gate: np.ndarray, up: np.ndarray, kind: int, threads: int | None = None) -> None:
    """Replace gate by activation(gate) * up.

    gate, up: [rows, columns], C-contiguous. kind: `gates.SILU` or `gates.GELU_TANH`. threads: number of threads (None:
    Numba's setting).

    Raises ValueError or TypeError for arrays that do not fit together.
    """
    if gate.ndim != 2 or gate.shape != up.shape:
        raise ValueError(f"gate {gate.shape} and up {up.shape} do not fit")
    with kernel_threads(threads) as used:
        call_region("gate rows", _variant(gate), _gate_region(_variant(gate), kind), (gate, up), used)


def _variant(x: np.ndarray) -> str:
    return "float32" if x.dtype == np.float32 else "bfloat16"


def _rows_of(variant: str) -> types.Array:
    return types.Array(types.uint16 if variant == "bfloat16" else types.float32, 2, "C")


@region_arguments("norm rows")
def _norm_arguments(variant: str) -> tuple[Any, ...]:
    """(x, added, weight, epsilon, out), as for `norm_rows`; added has no rows if nothing is added."""
    rows = _rows_of(variant)
    return rows, rows, types.Array(types.float32, 1, "C"), types.float64, rows


@region_arguments("rotate heads")
def _rotation_arguments(variant: str) -> tuple[Any, ...]:
    """(x, cos, sin, weight, epsilon), as for `rotate_heads`; weight is empty if there is no norm."""
    rows = _rows_of(variant)
    return rows, rows, rows, types.Array(types.float32, 1, "C"), types.float64


@region_arguments("gate rows")
def _gate_arguments(variant: str) -> tuple[Any, ...]:
    """(gate, up), as for `gate_rows`."""
    rows = _rows_of(variant)
    return rows, rows


@device_function(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _inverse_root(x, epsilon):
    """Returns 1 / sqrt(mean(x^2) + epsilon)."""
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return np.float32(1) / np.sqrt(total / np.float32(x.size) + np.float32(epsilon))


@device_function(error_model="numpy")
def _norm(numbers, weight, epsilon, out):
    """Write numbers [width], normalised and multiplied by weight, to out."""
    factor = _inverse_root(numbers, epsilon)
    for i in range(numbers.size):
        out[i] = rounded(out, number(rounded(out, numbers[i] * factor)) * weight[i])


@cache
def _norm_region(variant: str) -> int:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def norm(thread, threads, arguments):
        x, added, weight, epsilon, out = arguments_at("norm rows", variant, arguments)
        rows, width = x.shape
        numbers = np.empty(width, np.float32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            own = x[row]
            if added.shape[0] > 0:
                other = added[row]
                for i in range(width):
                    own[i] = rounded(x, number(own[i]) + number(other[i]))
            for i in range(width):
                numbers[i] = number(own[i])
            _norm(numbers, weight, epsilon, out[row])
        return np.int64(0 * code_version)

    return address_of(norm)


@cache
def _rotation_region(variant: str) -> int:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def rotate(thread, threads, arguments):
        x, cos, sin, weight, epsilon = arguments_at("rotate heads", variant, arguments)
        rows, (positions, dim) = x.shape[0], cos.shape
        half = dim // 2
        numbers = np.empty(dim, np.float32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            c, s = cos[row % positions], sin[row % positions]
            for at in range(0, x.shape[1], dim):
                own = x[row, at : at + dim]
                for i in range(dim):
                    numbers[i] = number(own[i])
                if weight.size:
                    _norm(numbers, weight, epsilon, own)
                    for i in range(dim):
                        numbers[i] = number(own[i])
                low, high, c_high, s_high = numbers[:half], numbers[half:], c[half:], s[half:]
                own_low, own_high = own[:half], own[half:]
                for i in range(half):
                    straight = number(rounded(x, low[i] * number(c[i])))
                    across = number(rounded(x, -high[i] * number(s[i])))
                    own_low[i] = rounded(x, straight + across)
                for i in range(half):
                    straight = number(rounded(x, high[i] * number(c_high[i])))
                    across = number(rounded(x, low[i] * number(s_high[i])))
                    own_high[i] = rounded(x, straight + across)
        return np.int64(0 * code_version)

    return address_of(rotate)


@device_function(error_model="numpy")
def _gate(gate, up, kind):
    for i in range(gate.size):
        gate[i] = rounded(gate, number(rounded(gate, activated(number(gate[i]), kind))) * number(up[i]))


@cache
def _gate_region(variant: str, kind: int) -> int:
    """Compile the region for one activation, because a loop with a branch on the kind would not be vectorised."""
    code_version = CODE_VERSION
    ahead = _AHEAD * 8 // _rows_of(variant).dtype.bitwidth

    @njit(REGION, cache=True, nogil=True, error_model="numpy")
    def gate_them(thread, threads, arguments):
        gate, up = arguments_at("gate rows", variant, arguments)
        rows, columns = gate.shape
        first, stop = rows * thread // threads * columns, rows * (thread + 1) // threads * columns
        own, other = gate.reshape(-1), up.reshape(-1)
        for at in range(first, stop, ahead):
            end = min(at + ahead, stop)
            prefetch(own, at + ahead, ahead)
            prefetch(other, at + ahead, ahead)
            _gate(own[at:end], other[at:end], kind)
        return np.int64(0 * code_version)

    return address_of(gate_them)
