"""Packed weights on a GPU equal the gguf package's numbers: torch functions, and interpreted Triton kernels."""

from __future__ import annotations

import functools

import pytest
import torch

from hetero_kv.cpu_ops.weight_blocks import pack
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.gpu_ops import packed_weights
from hetero_kv.gpu_ops.packed_weights import multiply, multiply_chosen, rows_of, unpack_into, unpacked_in_torch
from hetero_kv.weights.device_weight import DeviceWeight
from tests.support.devices import simulated_cuda
from tests.support.quantized_blocks import SELDOM, dequantized, random_blocks
from tests.support.slow_variants import with_slow

#: A whole tile and half of one; one block of the formats with the longest ones.
ROWS, COLUMNS = 24, 256
_WITHOUT_CODEBOOK = [name for name, layout in FORMATS.items() if not layout.codebook]


@functools.cache
def matrix(name, seed=0):
    """Packed bytes of a random matrix, and its numbers by the gguf package."""
    blocks = random_blocks(name, ROWS, COLUMNS, seed)
    return torch.from_numpy(pack(blocks, name, COLUMNS, 1)), torch.from_numpy(dequantized(blocks, name))


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def require_product(product, x, numbers, bias=0.0):
    """That sums of float32 are the exact ones, up to roundings of float32."""
    expected = x.double() @ numbers.double().T + bias
    assert (product.cpu() - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("name", with_slow(list(FORMATS), slow=SELDOM))
def test_torch_unpacks_ggmls_numbers_bit_by_bit(name):
    data, numbers = matrix(name)
    assert torch.equal(unpacked_in_torch(data, name, ROWS, COLUMNS), numbers)


@pytest.mark.cuda
@pytest.mark.parametrize("name", with_slow(_WITHOUT_CODEBOOK, slow={*_WITHOUT_CODEBOOK} & {*SELDOM}))
def test_triton_unpacks_and_multiplies_ggmls_numbers(name):
    pytest.importorskip("triton")
    data, numbers = matrix(name)
    with simulated_cuda(interpret=True):
        on_gpu = data.to("cuda")
        second_tile = torch.empty(ROWS - 16, COLUMNS, device="cuda")
        unpack_into(second_tile, on_gpu, name, 1)
        assert torch.equal(second_tile.cpu(), numbers[16:])
        x = random(1, COLUMNS)
        require_product(multiply(x.to("cuda"), on_gpu, name, ROWS), x, numbers)


@pytest.mark.cuda
@pytest.mark.parametrize("name", with_slow(["IQ2_XXS", "IQ3_S", "IQ1_M"], slow=["IQ2_XXS", "IQ1_M"]))
def test_torch_unpacks_codebooks_on_a_gpu_that_runs_triton(name):
    data, numbers = matrix(name)
    with simulated_cuda(interpret=True):
        weight = DeviceWeight(data.to("cuda"), name, ROWS, COLUMNS)
        x = random(2, COLUMNS)
        require_product(weight.multiply(x.to("cuda")), x, numbers)
        found = weight.rows(torch.tensor([20, 3], device="cuda"), torch.float32)
        assert torch.equal(found.cpu(), numbers[[20, 3]])


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["Q6_K", "MXFP4"])
def test_rows_that_are_looked_up_are_the_numbers_and_others_are_none(name):
    pytest.importorskip("triton")
    data, numbers = matrix(name)
    with simulated_cuda(interpret=True):
        ids = torch.tensor([3, ROWS - 1, 16, ROWS, -1], device="cuda")
        found = rows_of(data.to("cuda"), name, ROWS, COLUMNS, ids, torch.float16).cpu()
    assert torch.equal(found[:3], numbers[[3, ROWS - 1, 16]].half())
    assert found[3:].isnan().all()


@pytest.mark.cuda
def test_many_rows_and_a_bias_are_multiplied_in_one_launch():
    pytest.importorskip("triton")
    data, numbers = matrix("Q4_K")
    # Not contiguous: the last of a prompt's hidden states.
    x, bias = random(9, 2, COLUMNS)[:, 1], random(ROWS)
    with simulated_cuda(interpret=True) as gpu:
        arguments = x.to("cuda"), data.to("cuda"), "Q4_K", ROWS, bias.to("cuda")
        # The first time it is tried whether Triton runs here.
        multiply(*arguments)
        gpu.record.clear()
        product = multiply(*arguments)
        assert len(gpu.record.launches) == 1
        require_product(product, x, numbers, bias)


@pytest.mark.cuda
@pytest.mark.parametrize("interpret", [False, True])
def test_a_row_is_multiplied_with_the_matrix_that_it_chose(interpret):
    pytest.importorskip("triton")
    matrices = [matrix("Q5_0", seed) for seed in range(3)]
    x, chosen = random(4, COLUMNS), torch.tensor([2, 0, 3, 2])
    with simulated_cuda(interpret=interpret):
        data = torch.stack([data for data, _ in matrices]).to("cuda")
        products = multiply_chosen(x.to("cuda"), data, "Q5_0", ROWS, chosen.to("cuda")).cpu()
    for row in (0, 1, 3):
        require_product(products[row], x[row], matrices[chosen[row]][1])
    # There is no fourth matrix.
    assert not products[2].any()


@pytest.mark.cuda
def test_torch_does_without_triton_piece_by_piece(monkeypatch):
    monkeypatch.setattr(packed_weights, "runs_triton", lambda tensor: False)
    monkeypatch.setattr(packed_weights, "_UNPACKED_AT_ONCE", 16 * COLUMNS)
    data, numbers = matrix("Q6_K")
    with simulated_cuda():
        on_gpu, ids = data.to("cuda"), torch.arange(ROWS, device="cuda")
        whole = torch.empty(ROWS, COLUMNS, device="cuda")
        unpack_into(whole, on_gpu, "Q6_K")
        assert torch.equal(whole.cpu(), numbers)
        assert torch.equal(rows_of(on_gpu, "Q6_K", ROWS, COLUMNS, ids, torch.float32).cpu(), numbers)


@pytest.mark.cuda
def test_each_is_one_launch_and_allocates_only_its_result():
    pytest.importorskip("triton")
    data, _ = matrix("Q4_0")
    with simulated_cuda() as gpu:
        on_gpu, ids = data.to("cuda"), torch.arange(3, device="cuda")
        x, out = random(3, COLUMNS).to("cuda"), torch.empty(ROWS, COLUMNS, device="cuda")
        rows_of(on_gpu, "Q4_0", ROWS, COLUMNS, ids, torch.float32)
        gpu.record.clear()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        unpack_into(out, on_gpu, "Q4_0")
        assert torch.cuda.max_memory_allocated() == before
        product, rows = multiply(x, on_gpu, "Q4_0", ROWS), rows_of(on_gpu, "Q4_0", ROWS, COLUMNS, ids, torch.float32)
        assert torch.cuda.max_memory_allocated() == before + product.nbytes + rows.nbytes
        assert len(gpu.record.everything) == 3
