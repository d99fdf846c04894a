"""Products of a prompt's rows by AMX tiles are those of weights in bfloat16, rounded once, each row's own."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.cpu_features import forced_isa
from hetero_kv.cpu_ops.prompt_products_tiles import multiply_prompt_by_tiles
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix
from hetero_kv.cpu_ops.tile_products import ROWS_AT_ONCE
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.weights.kernel_arrays import bits
from hetero_kv.weights.quantized_weight import QuantizedWeight
from tests.support.quantized_blocks import SELDOM, random_blocks
from tests.support.slow_variants import with_slow

tiles = pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
#: Rounding a sum of float32 products to bfloat16.
ROUNDING = 2**-8


def matrix_of(name, rows, columns):
    return PackedMatrix.of_blocks(random_blocks(name, rows, columns), name, columns)


def numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def product(x, matrix, threads=None):
    out = torch.full((len(x), matrix.rows), 7.0, dtype=torch.bfloat16)
    multiply_prompt_by_tiles(bits(x), matrix, bits(out), threads)
    return out


def expected(x, matrix):
    return x.double() @ QuantizedWeight(matrix).unpacked(torch.bfloat16).double().T


def assert_close(mine, reference):
    assert torch.isfinite(mine).all()
    assert (mine.double() - reference).abs().max() <= ROUNDING * reference.abs().max()


@tiles
@pytest.mark.parametrize("name", with_slow(sorted(FORMATS), slow=SELDOM))
def test_weights_of_every_format_are_multiplied_in_bfloat16(name):
    x, matrix = numbers(40, 512), matrix_of(name, 48, 512)
    assert_close(product(x, matrix), expected(x, matrix))


@tiles
@given(
    st.sampled_from(["Q4_K", "Q8_0"]), st.integers(1, 600), st.sampled_from([1, 15, 16, 40, 300, 600]),
    st.sampled_from([256, 768]), st.sampled_from([1, None]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_rows_and_outputs_are_multiplied_and_rounded_once(name, rows, outputs, columns, threads):
    matrix, x = matrix_of(name, outputs, columns), numbers(rows, columns)
    assert_close(product(x, matrix, threads), expected(x, matrix))


@tiles
@pytest.mark.parametrize("columns", [224, 8192])
def test_columns_need_not_fill_a_cache_nor_fit_into_one(columns):
    matrix, x = matrix_of("Q8_0", 70, columns), numbers(50, columns)
    assert_close(product(x, matrix), expected(x, matrix))


@tiles
def test_other_rows_and_threads_do_not_change_a_bit():
    matrix, x = matrix_of("Q4_K", 130, 768), numbers(ROWS_AT_ONCE + 90, 768)
    whole = product(x, matrix, threads=1)
    assert torch.equal(product(x, matrix), whole)
    for some in (slice(0, 1), slice(5, 38), slice(ROWS_AT_ONCE - 3, ROWS_AT_ONCE + 60)):
        assert torch.equal(product(x[some], matrix), whole[some])


@tiles
def test_numbers_that_are_not_finite_stay_so_and_in_their_row():
    x = numbers(40, 256)
    x[3, 5], x[9, 200] = float("nan"), float("inf")
    out = product(x, matrix_of("Q8_0", 32, 256))
    assert not out[[3, 9]].isfinite().any()
    assert out[[each for each in range(40) if each not in (3, 9)]].isfinite().all()


@pytest.mark.parametrize(
    ("x", "out", "error", "message"),
    [
        (np.zeros((40, 256), np.uint16), np.zeros((40, 31), np.uint16), ValueError, r"do not fit a Q8_0 \[32"),
        (np.zeros((40, 224), np.uint16), np.zeros((40, 32), np.uint16), ValueError, r"x \(40, 224\)"),
        (np.zeros((40, 256), np.float32), np.zeros((40, 32), np.uint16), TypeError, "x is float32"),
        (np.zeros((40, 256), np.uint16), np.zeros((40, 32), np.float32), TypeError, "out float32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, out, error, message):
    with pytest.raises(error, match=message):
        multiply_prompt_by_tiles(x, matrix_of("Q8_0", 32, 256), out)


def test_a_cpu_without_tiles_is_told_so():
    with forced_isa("generic"), pytest.raises(NotImplementedError, match="no AMX tiles of bfloat16"):
        product(numbers(40, 256), matrix_of("Q8_0", 32, 256))


COMPILED = """
import torch
from hetero_kv.cpu_ops.fused_decode_layer import gate_region
from hetero_kv.cpu_ops.gates import SILU
from hetero_kv.weights.quantized_weight import QuantizedWeight

weight, x = QuantizedWeight.of_numbers(torch.ones(32, 64), "Q8_0"), torch.ones(3, 64)
assert torch.allclose(weight.multiply(x), torch.full((3, 32), 64.0), rtol=1e-2) and gate_region(SILU)
print("compiled")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for a CPU of x86-64")
def test_kernels_that_may_call_those_of_tiles_compile_for_a_cpu_without_tiles(tmp_path):
    features = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi2"}
    caches = {"NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    variables = os.environ | features | caches | {"HETERO_KV_ISA": "avx2"}
    found = subprocess.run([sys.executable, "-c", COMPILED], env=variables, capture_output=True, text=True, check=False)
    assert found.stdout == "compiled\n", found.stderr
