"""Kernels that copy parts of arrays have no code that words errors: compiling it takes as long as the kernel's own."""

from __future__ import annotations

import pytest

from hetero_kv.cpu_ops import block_choice, expert_regions, recurrent_prompts, vertical_slash_scores
from hetero_kv.cpu_ops.gates import SILU
from hetero_kv.cpu_ops.kernel_address import _ADDRESSES, address_of
from hetero_kv.cpu_ops.qk_tile import QKTileShape


def functions_of(address):
    """Names of the functions in a kernel's code, compiled or loaded."""
    (kernel,) = (kernel for kernel, own in _ADDRESSES.items() if own == address)
    (found,) = kernel.overloads.values()
    if hasattr(found.library, "hetero_kv_bitcode"):
        return found.library.hetero_kv_bitcode.defined
    return {each.name for each in found.library._get_module_for_linking().functions if not each.is_declaration}


@pytest.mark.parametrize(
    "region",
    [
        block_choice.region,
        lambda: expert_regions.gates_region(SILU, "float32"),
        lambda: recurrent_prompts.convolution_region("float32 float32"),
        lambda: address_of(vertical_slash_scores._region(QKTileShape.of(False, 16), False)),
    ],
    ids=["choice of blocks", "products of experts", "convolution", "vertical and slash scores"],
)
def test_a_kernel_that_copies_has_no_text_code(region):
    functions = functions_of(region())
    assert functions
    assert not [each for each in functions if "unicode" in each]
