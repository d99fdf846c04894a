"""Products with packed weights equal products with the weights that the gguf package dequantises."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops import weight_dots
from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.cpu_features import available, forced_isa
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix, multiply, multiply_runs
from hetero_kv.cpu_ops.weight_formats import FORMATS, format_named
from hetero_kv.cpu_ops.weight_unpack import read_rows, unpack_tiles
from hetero_kv.weights.tensor_types import BLOCK_SIZES, type_named
from tests.support.quantized_blocks import SELDOM, dequantized, random_blocks
from tests.support.slow_variants import with_few, with_slow

CODED = [name for name, layout in FORMATS.items() if not layout.number]


def quantized_activations(x):
    """(codes, scales, sums) of x, and the numbers that they stand for."""
    rows, columns = x.shape
    codes = np.empty((rows, columns), np.int8)
    scales, sums = np.empty((rows, columns // 32), np.float32), np.empty((rows, columns // 16), np.int32)
    quantize_rows(x, codes, scales, sums)
    return codes, scales, sums, (codes.reshape(rows, -1, 32) * scales[..., None]).reshape(rows, columns)


def activations(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def require_products(out, x, numbers, name):
    """That out is x, as int8 codes where weights are codes too, times numbers, to float32's rounding of the sums."""
    exact = (x if FORMATS[name].number else quantized_activations(x)[3]).astype(np.float64)
    expected = exact @ numbers.T.astype(np.float64)
    sizes = np.abs(exact) @ np.abs(numbers.T.astype(np.float64))
    assert (np.abs(out - expected) <= 1e-5 * sizes + 1e-30).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_described_as_ggml_has_it(name):
    columns, size = BLOCK_SIZES[type_named(name)]
    # There, every number is one block.
    blocks = FORMATS[name].columns if FORMATS[name].number else 1
    assert (columns * blocks, size * blocks) == (FORMATS[name].columns, FORMATS[name].block_bytes)


# On other instruction sets than the best a few formats suffice: the others have the same code.
_BY_ISA = [(name, isa) for name in FORMATS for isa in available()]
_SELDOM = [
    (name, isa)
    for number, name in enumerate(FORMATS)
    for rank, isa in enumerate(available())
    if name in SELDOM or (rank and (number + rank) % 8)
]

_CODED_BY_ISA, _SELDOM_CODED = ([each for each in pairs if each[0] in CODED] for pairs in (_BY_ISA, _SELDOM))


@pytest.mark.parametrize(("name", "isa"), with_slow(_BY_ISA, slow=_SELDOM))
def test_products_with_codes_are_products_with_the_numbers(name, isa):
    with forced_isa(isa):
        for rows, outputs, blocks, threads in ((1, 40, 3, 1), (7, 16, 1, 2), (4, 1, 2, 2)):
            columns = blocks * FORMATS[name].columns
            packed = random_blocks(name, outputs, columns, seed=rows)
            x = activations(rows, columns, seed=outputs)
            out = multiply(x, [PackedMatrix.of_blocks(packed, name, columns)], threads)[0]
            require_products(out, x, dequantized(packed, name), name)


@pytest.mark.skipif("avx2" not in available(), reason="needs AVX2")
@pytest.mark.parametrize("name", with_few(CODED, ["Q4_0", "Q8_0", "Q4_K", "Q6_K"]))
def test_products_without_dot_product_instructions_are_the_same(name, monkeypatch):
    """A CPU with AVX2 alone multiplies pairs of bytes to 16 bits, whose sums must not saturate."""
    monkeypatch.setattr(weight_dots, "dot_instruction", lambda: "avx2")
    columns = 2 * FORMATS[name].columns
    for seed, size in ((0, 1.0), (1, 1e-3)):
        packed, x = random_blocks(name, 40, columns, seed), activations(5, columns, seed) * np.float32(size)
        # The largest codes and activations of either sign in some places.
        x[1] = np.sign(x[1])
        out = multiply(x, [PackedMatrix.of_blocks(packed, name, columns)])[0]
        require_products(out, x, dequantized(packed, name), name)


@pytest.mark.parametrize("name", ["Q5_0", "Q8_0", "Q4_K", "BF16"])
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 33), outputs=st.integers(1, 70), blocks=st.integers(1, 6), seed=st.integers(0, 9999),
    threads=st.integers(1, 4), split=st.integers(1, 3),
)  # fmt: skip
def test_products_of_any_shape(name, rows, outputs, blocks, seed, threads, split):
    columns = blocks * FORMATS[name].columns
    packed = [random_blocks(name, outputs + part, columns, seed + part) for part in range(split)]
    matrices = [PackedMatrix.of_blocks(each, name, columns) for each in packed]
    x = activations(rows, columns, seed)
    for out, each in zip(multiply(x, matrices, min(threads, 2)), packed, strict=True):
        require_products(out, x, dequantized(each, name), name)


@pytest.mark.parametrize("name", with_slow(list(FORMATS), slow=SELDOM))
def test_a_row_does_not_depend_on_the_other_rows(name):
    """Rows of one pass over the codes, of a wide pass, and of both."""
    columns = 2 * FORMATS[name].columns
    matrix = PackedMatrix.of_blocks(random_blocks(name, 50, columns), name, columns)
    x = activations(13, columns)
    alone = np.concatenate([multiply(x[row : row + 1], [matrix])[0] for row in range(13)])
    for rows in range(2, 14):
        assert (multiply(x[:rows], [matrix])[0] == alone[:rows]).all()


@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_rows_in_groups_of_tiles_equal_each_row_alone(name):
    """Of a matrix so wide that two tiles fill what stays in a core's cache."""
    matrix, x = PackedMatrix.of_blocks(random_blocks(name, 90, 4096), name, 4096), activations(9, 4096)
    alone = np.concatenate([multiply(x[row : row + 1], [matrix])[0] for row in range(9)])
    for threads in (1, 2):
        assert (multiply(x, [matrix], threads)[0] == alone).all()


@pytest.mark.parametrize(("name", "isa"), with_slow(_CODED_BY_ISA, slow=_SELDOM_CODED))
def test_extreme_codes_do_not_overflow(name, isa):
    """The largest codes of either sign against the largest activations of either sign."""
    layout = FORMATS[name]
    columns = 2 * layout.columns
    for fill in (0, 0x7F, 0x80, 0xFF):
        packed = random_blocks(name, 16, columns)
        scales = random_blocks(name, 16, columns, seed=1)
        codes = np.full_like(packed, fill)
        # Scales stay finite: only bytes that differ between two seeds by chance alone are codes.
        codes_only = packed.reshape(16, 2, -1).copy()
        codes_only[..., 4:] = codes.reshape(16, 2, -1)[..., 4:]
        if name in ("Q2_K", "Q3_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ1_M"):
            codes_only[..., -8:] = scales.reshape(16, 2, -1)[..., -8:]
        blocks = codes_only.reshape(16, -1)
        numbers = dequantized(blocks, name)
        x = np.ones((2, columns), np.float32)
        x[1] = -1
        with forced_isa(isa):
            out = multiply(x, [PackedMatrix.of_blocks(blocks, name, columns)], threads=1)[0]
        require_products(out, x, numbers, name)


# The products above have the codes of most others, which a kernel unpacks that is compiled for each.
@pytest.mark.parametrize("name", with_few(list(FORMATS), ["Q8_0", "Q4_K", "Q6_K", "IQ2_XS", "F16", "BF16"]))
def test_unpacked_numbers_are_ggufs_to_the_bit(name):
    columns = 2 * FORMATS[name].columns
    blocks = random_blocks(name, 50, columns)
    numbers, matrix = dequantized(blocks, name), PackedMatrix.of_blocks(blocks, name, columns)
    rows = np.array([49, 3, 3, 0])
    assert (read_rows(matrix, rows) == numbers[rows]).all()
    numbers_of = {np.float32: torch.float32, np.uint16: torch.bfloat16, np.float16: torch.float16}
    for dtype, number in numbers_of.items() if name in ("Q5_1", "Q6_K", "F16") else [(np.uint16, torch.bfloat16)]:
        out = np.empty((columns, 48), dtype)
        unpack_tiles(matrix, out, first_tile=1)
        expected = torch.from_numpy(numbers[16:]).to(number)
        view = torch.from_numpy(out).view(number) if dtype is np.uint16 else torch.from_numpy(out)
        assert torch.equal(view[:, :34].T, expected)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), exponent=st.integers(-30, 30), zeros=st.booleans())
def test_activations_are_within_half_a_step_of_their_codes(seed, exponent, zeros):
    x = activations(3, 96, seed) * np.float32(2.0**exponent)
    if zeros:
        x[1, 32:64] = 0
    codes, scales, sums, numbers = quantized_activations(x)
    assert (np.abs(numbers - x) <= 0.5001 * np.repeat(scales, 32, axis=1)).all()
    assert (sums == codes.reshape(3, -1, 16).sum(2)).all()
    assert (np.abs(codes.astype(int)) <= 127).all()


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_an_activation_that_is_no_number_is_not_lost(odd):
    x = activations(2, 64)
    x[1, 40] = odd
    out = multiply(x, [PackedMatrix.of_blocks(random_blocks("Q8_0", 16, 64), "Q8_0", 64)])[0]
    assert np.isfinite(out[0]).all()
    assert not np.isfinite(out[1]).any()


def test_several_python_threads_multiply_at_once():
    blocks = random_blocks("Q5_0", 200, 256)
    matrix, x = PackedMatrix.of_blocks(blocks, "Q5_0", 256), activations(3, 256)
    expected = multiply(x, [matrix])[0].copy()
    wrong = []

    def work():
        wrong.extend(1 for _ in range(30) if not (multiply(x, [matrix])[0] == expected).all())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("names", [("Q4_K", "Q4_K"), ("Q4_K", "F16"), ("BF16", "BF16")])
def test_runs_of_rows_have_matrices_of_their_own(names):
    """Every run is what it is alone, in whatever formats its matrices are."""
    x, ends = activations(9, 256), (1, 6, 9)
    runs = []
    for number, end in enumerate(ends):
        matrices = [
            PackedMatrix.of_blocks(random_blocks(name, rows, 256, seed=7 * number + rows), name, 256)
            for name, rows in zip(names if number else names[::-1], (20, 33), strict=True)
        ]
        runs.append(((0, *ends)[number], end, matrices))
    together = multiply_runs(x, runs, 2)
    assert [each.shape for each in together] == [(9, 20), (9, 33)]
    for first, end, matrices in runs:
        for whole, alone in zip(together, multiply(x[first:end], matrices), strict=True):
            assert (whole[first:end] == alone).all()


def test_arrays_of_wrong_shapes_are_refused():
    matrix = PackedMatrix.of_blocks(random_blocks("Q8_0", 20, 64), "Q8_0", 64)
    with pytest.raises(ValueError, match="must be"):
        multiply(activations(1, 96), [matrix])
    with pytest.raises(ValueError, match="cover 3 rows"):
        multiply_runs(activations(3, 64), [(0, 1, [matrix]), (2, 3, [matrix])])
    other = PackedMatrix.of_blocks(random_blocks("Q8_0", 16, 64), "Q8_0", 64)
    with pytest.raises(ValueError, match=r"\[20\] rows"):
        multiply_runs(activations(3, 64), [(0, 1, [matrix]), (1, 3, [other])])
    with pytest.raises(TypeError, match="float64"):
        multiply(activations(1, 64).astype(np.float64), [matrix])
    with pytest.raises(ValueError, match="Q9_9"):
        format_named("Q9_9")
    with pytest.raises(ValueError, match="not rows of 100 columns"):
        PackedMatrix.of_blocks(random_blocks("Q8_0", 20, 64), "Q8_0", 100)
    with pytest.raises(IndexError, match="20"):
        read_rows(matrix, np.array([20]))
    with pytest.raises(ValueError, match="does not fit"):
        unpack_tiles(matrix, np.empty((64, 48), np.float32))
    with pytest.raises(TypeError, match="float64"):
        unpack_tiles(matrix, np.empty((64, 16), np.float64))
