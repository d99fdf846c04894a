"""The native call for a mixture's experts equals products with their numbers, however rows and threads divide."""

import numpy as np
import pytest

from hetero_kv.cpu_ops.activations import quantize_rows
from hetero_kv.cpu_ops.cpu_features import available, forced_isa
from hetero_kv.cpu_ops.expert_products import expert_regions, experts_output
from hetero_kv.cpu_ops.gates import SILU, SQUARED_RELU
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time
from hetero_kv.cpu_ops.weight_dots import rows_per_pass
from tests.support.quantized_blocks import dequantized, random_blocks

EXPERTS, WIDTH, INNER = 5, 256, 96
NONE = np.empty((0, 0), np.float32)


def eight_bits(x):
    """The numbers that the codes of x stand for."""
    rows, columns = x.shape
    codes, scales = np.empty((rows, columns), np.int8), np.empty((rows, columns // 32), np.float32)
    quantize_rows(x, codes, scales, np.empty((rows, columns // 16), np.int32))
    return (codes.reshape(rows, -1, 32) * scales[..., None]).reshape(rows, columns)


def random_experts():
    """[[gate, up, down] of each expert] as packed matrices, which must be kept, and as numbers."""
    shapes = [("Q4_K", INNER, WIDTH), ("Q4_K", INNER, WIDTH), ("Q8_0", WIDTH, INNER)]
    blocks = [
        [random_blocks(*shape, seed=3 * expert + part) for part, shape in enumerate(shapes)]
        for expert in range(EXPERTS)
    ]
    numbers = [[dequantized(each, shapes[part][0]) for part, each in enumerate(own)] for own in blocks]
    stacks = []
    for part, (name, _, columns) in enumerate(shapes):
        data = np.stack([PackedMatrix.of_blocks(own[part], name, columns).data for own in blocks])
        stacks.append((data, name, shapes[part]))
    return stacks, numbers


def routed(rows, seed=0):
    """Rows, their experts and shares: expert 0 has most rows, expert 3 none, and the last row a single one."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, WIDTH)).astype(np.float32)
    chosen = np.stack([np.where(np.arange(rows) % 9 < 7, 0, 1), 2 + 2 * (np.arange(rows) % 2)], axis=1)
    chosen[-1, 1] = EXPERTS
    return x, chosen.astype(np.int64), generator.random((rows, 2)).astype(np.float32)


def output(stacks, x, chosen, shares, threads, kind=SILU):
    matrices = np.empty((3, 5), np.int64)
    for part, (data, name, (_, rows, columns)) in enumerate(stacks):
        address, tiles, one, several = PackedMatrix(data[0], name, rows, columns).call[:4]
        matrices[part] = address, data.strides[0], tiles, one, several
    out = np.empty_like(x)
    with one_kernel_at_a_time:
        experts_output("float32")(
            all_threads(), expert_regions(kind, "float32"), x, chosen, shares, EXPERTS, matrices, NONE, NONE, NONE,
            np.float32(0), np.float32(0), out, rows_per_pass(), threads,
        )  # fmt: skip
    return out


def reference(numbers, x, chosen, shares, kind=SILU):
    """By numbers, with activations of 8 bits; without gates the first matrix is the up projection."""
    out = np.zeros_like(x)
    for row, choice in np.ndindex(chosen.shape):
        if chosen[row, choice] < EXPERTS:
            gate, up, down = numbers[chosen[row, choice]]
            own = eight_bits(x[row : row + 1])
            gates = own @ gate.T
            inner = gates * (1 + np.tanh(gates / 2)) / 2 * (own @ up.T)
            inner = np.maximum(gates, 0) ** 2 if kind == SQUARED_RELU else inner
            out[row] += shares[row, choice] * (eight_bits(inner.astype(np.float32)) @ down.T)[0]
    return out


@pytest.mark.parametrize("kind", [SILU, SQUARED_RELU])
@pytest.mark.parametrize("isa", available()[:2])
def test_experts_give_what_their_numbers_give(isa, kind):
    stacks, numbers = random_experts()
    with forced_isa(isa):
        for rows in (1, 3, 41):
            x, chosen, shares = routed(rows)
            expected = reference(numbers, x, chosen, shares, kind)
            difference = output(stacks, x, chosen, shares, 2, kind) - expected
            # An activation between two codes may be rounded otherwise.
            assert np.linalg.norm(difference) < 2e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", [SILU, SQUARED_RELU])
def test_neither_threads_nor_other_rows_change_a_bit(kind):
    stacks, _ = random_experts()
    x, chosen, shares = routed(41)
    parts = [[each[row : row + 1] for each in (x, chosen, shares)] for row in range(41)]
    alone = [output(stacks, *part, 1, kind) for part in parts]
    for threads in (1, 2, 3):
        assert (output(stacks, x, chosen, shares, threads, kind) == np.concatenate(alone)).all()
