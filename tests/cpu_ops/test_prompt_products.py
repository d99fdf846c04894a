"""A prompt's products by codes are those of each row alone, rounded to the model's dtype once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.prompt_products import multiply_prompt
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix, multiply
from hetero_kv.weights.kernel_arrays import bits
from tests.support.quantized_blocks import random_blocks

NAMES = "Q4_K", "Q8_0", "Q5_0"


def matrix_of(name, rows, columns):
    return PackedMatrix.of_blocks(random_blocks(name, rows, columns), name, columns)


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def row_by_row(x, matrix, bias):
    """The products of each row alone, in x's dtype."""
    alone = [multiply(row[None].float().numpy(), (matrix,))[0] for row in x]
    products = torch.from_numpy(np.concatenate(alone))
    return (products if bias is None else products + bias).to(x.dtype)


def product(x, matrix, bias=None, threads=None):
    out = torch.full((len(x), matrix.rows), 7.0, dtype=x.dtype)
    multiply_prompt(bits(x), matrix, bits(out), None if bias is None else bias.numpy(), threads)
    return out


@given(
    st.sampled_from(NAMES), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 600),
    st.sampled_from([1, 15, 16, 40]), st.booleans(), st.sampled_from([1, None]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_rows_are_those_of_each_row_alone(name, dtype, rows, outputs, has_bias, threads):
    matrix, x = matrix_of(name, outputs, 512), numbers(rows, 512, dtype=dtype)
    bias = numbers(outputs) if has_bias else None
    assert torch.equal(product(x, matrix, bias, threads), row_by_row(x, matrix, bias))


def test_wide_rows_pass_in_parts_that_fit_into_a_cache():
    matrix, x = matrix_of("Q4_K", 48, 8192), numbers(100, 8192)
    assert torch.equal(product(x, matrix), row_by_row(x, matrix, None))


@pytest.mark.parametrize(
    ("x", "out", "bias", "error", "message"),
    [
        (np.zeros((40, 256), np.float32), np.zeros((40, 31), np.float32), None, ValueError, r"do not fit a Q8_0 \[32"),
        (np.zeros((40, 224), np.float32), np.zeros((40, 32), np.float32), None, ValueError, r"x \(40, 224\)"),
        (np.zeros((40, 256)), np.zeros((40, 32)), None, TypeError, "x is float64"),
        (np.zeros((40, 256), np.float32), np.zeros((40, 32), np.uint16), None, TypeError, "out uint16"),
        (np.zeros((40, 256), np.float32), np.zeros((40, 32), np.float32), np.zeros(3, np.float32), ValueError, "bias"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, out, bias, error, message):
    with pytest.raises(error, match=message):
        multiply_prompt(x, matrix_of("Q8_0", 32, 256), out, bias)


def test_numbers_that_are_not_finite_stay_so():
    x = numbers(40, 256)
    x[3, 5], x[9, 200] = float("nan"), float("inf")
    out = product(x, matrix_of("Q8_0", 32, 256))
    assert not out[[3, 9]].isfinite().any()
    assert out[[each for each in range(40) if each not in (3, 9)]].isfinite().all()
