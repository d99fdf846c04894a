"""Triton kernels equal the torch functions that define them."""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton
from tests.support.slow_variants import with_slow

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]


def printed_by(script, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(CHECKOUT)
    run = subprocess.run(
        [sys.executable, HERE / script, *arguments], cwd=CHECKOUT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module", params=with_slow(["each", "pairs", "all"], slow=["pairs", "all"]))
def which(request):
    """Which cases are computed: each of what cases combine, every pair of it, or all combinations."""
    return request.param


@pytest.fixture(scope="module")
def interpreted(which):
    return printed_by("interpreted_kernels.py", *([] if which == "each" else [which]))


@needs_triton
@pytest.mark.parametrize("kernel", ["merged", "rebuilt", "brought", "rotated", "most alike", "merged into one"])
def test_a_kernel_equals_torch_up_to_one_rounding(interpreted, which, kernel):
    assert len(interpreted[kernel]) >= (5 if which == "each" else 15)
    # Sums of float32 may differ in their order, by a few roundings.
    limits = {case: 20 if "float32" in case.split(",")[0] else 1 for case in interpreted[kernel]}
    assert {case: apart for case, apart in interpreted[kernel].items() if not apart <= limits[case]} == {}


@needs_triton
def test_flash_attention_equals_torchs(interpreted, which):
    assert len(interpreted["attended"]) == (6 if which == "each" else 18)
    # A half-precision weight is rounded before it is multiplied; the log-sum-exp is of float32 always.
    limits = {case: (20 if "float32" in case.split(",")[0] else 3, 20) for case in interpreted["attended"]}
    found = {case: tuple(apart) for case, apart in interpreted["attended"].items()}
    assert {case: apart for case, apart in found.items() if not all(map(operator.le, apart, limits[case]))} == {}


@needs_triton
def test_a_token_joins_its_window_and_is_attended_to_as_by_torch(interpreted, which):
    assert len(interpreted["taken"]) == {"each": 4, "pairs": 12, "all": 36}[which]
    # A half-precision weight is rounded before it is multiplied, in another part another way; the rest is of float32.
    limits = {case: 20 if "float32" in case.split(",")[0] else 3 for case in interpreted["taken"]}
    wrong = {
        case: found
        for case, found in interpreted["taken"].items()
        if not (found[0] <= limits[case] and found[1] <= 20 and found[2])
    }
    assert wrong == {}


@needs_triton
def test_attention_to_sets_is_that_in_float64(interpreted, which):
    assert len(interpreted["attended to sets"]) == (5 if which == "each" else 15)
    # A half-precision weight is rounded before it is multiplied; the log-sum-exp is of float32 always.
    limits = {case: 20 if "float32" in case.split(",")[0] else 3 for case in interpreted["attended to sets"]}
    wrong = {
        case: found
        for case, found in interpreted["attended to sets"].items()
        if not (found[0] <= limits[case] and found[1] <= 20 and found[2])
    }
    assert wrong == {}


@needs_triton
def test_scores_of_queries_are_those_in_float64(interpreted, which):
    assert len(interpreted["query scores"]) == (5 if which == "each" else 15)
    # Exponentials of differences of float32 numbers, and sums of some.
    assert {case: apart for case, apart in interpreted["query scores"].items() if not max(apart) <= 50} == {}


@needs_triton
def test_column_sums_equal_torchs(interpreted, which):
    assert len(interpreted["summed"]) == (3 if which == "each" else 9)
    assert {case: apart for case, apart in interpreted["summed"].items() if not apart <= 50} == {}


@needs_triton
def test_gathered_rows_are_the_rows_themselves(interpreted):
    assert set(interpreted["gathered"].values()) == {True}


@needs_triton
def test_blocks_are_scored_and_attended_to_in_slots_as_by_torch(interpreted, which):
    assert len(interpreted["scored"]) == (6 if which == "each" else 30)
    assert {case: apart for case, apart in interpreted["scored"].items() if not apart <= 20} == {}
    assert len(interpreted["resident"]) == (7 if which == "each" else 21)
    # A half-precision weight is rounded before it is multiplied, in another part another way; the rest is of float32.
    limits = {case: 20 if "float32" in case.split(",")[0] else 3 for case in interpreted["resident"]}
    wrong = {
        case: found
        for case, found in interpreted["resident"].items()
        if not (found[0] <= limits[case] and found[1] <= 20 and found[2])
    }
    assert wrong == {}


@needs_triton
@pytest.mark.parametrize("kernel", ["chosen", "padded", "divided"])
def test_blocks_are_chosen_and_placed_as_by_torch(interpreted, kernel):
    assert len(interpreted[kernel]) >= 3
    assert set(interpreted[kernel].values()) == {True}


@needs_triton
def test_single_tokens_are_estimated_and_attended_to_as_by_torch(interpreted, which):
    assert len(interpreted["estimated"]) == (9 if which == "each" else 27)
    # Scores add up thousands of float32 numbers, in another order.
    assert {case: apart for case, apart in interpreted["estimated"].items() if not apart <= 50} == {}
    assert {case: apart for case, apart in interpreted["left"].items() if not apart <= 20} == {}
    assert len(interpreted["tokens attended"]) == (5 if which == "each" else 15)
    # A half-precision weight is rounded before it is multiplied, in another part another way; the rest is of float32.
    limits = {case: 20 if "float32" in case.split(",")[0] else 3 for case in interpreted["tokens attended"]}
    found = interpreted["tokens attended"].items()
    assert {case: apart for case, apart in found if not (apart[0] <= limits[case] and apart[1] <= 20)} == {}


@needs_triton
@pytest.mark.parametrize("kernel", ["chosen by shares", "tokens brought"])
def test_single_tokens_are_chosen_and_placed_as_by_torch(interpreted, kernel):
    assert len(interpreted[kernel]) >= 8
    assert set(interpreted[kernel].values()) == {True}


@needs_triton
def test_clusters_are_scored_chosen_and_attended_to_as_by_torch(interpreted, which):
    assert (
        len(interpreted["clusters scored"]) == len(interpreted["clusters attended"]) == (5 if which == "each" else 15)
    )
    assert {case: apart for case, apart in interpreted["clusters scored"].items() if not apart <= 20} == {}
    assert len(interpreted["clusters chosen"]) == (6 if which == "each" else 12)
    assert set(interpreted["clusters chosen"].values()) == {True}
    # A half-precision weight is rounded before it is multiplied, in another part another way; the rest is of float32.
    limits = {case: 20 if "float32" in case.split(",")[0] else 3 for case in interpreted["clusters attended"]}
    found = interpreted["clusters attended"].items()
    assert {case: apart for case, apart in found if not (apart[0] <= limits[case] and apart[1] <= 20)} == {}


@needs_triton
def test_rows_that_lie_anywhere_are_as_rows_side_by_side(interpreted, which):
    assert len(interpreted["rows anywhere"]) == (7 if which == "each" else 9)
    assert {case: is_equal for case, is_equal in interpreted["rows anywhere"].items() if not is_equal} == {}


@needs_triton
@pytest.mark.parametrize("kernel", ["appended", "lowest left out", "kept", "drawn"])
def test_entries_of_a_bounded_cache_equal_torchs(interpreted, kernel):
    assert len(interpreted[kernel]) >= 9
    assert set(interpreted[kernel].values()) == {True}


@needs_triton
def test_slots_are_assigned_as_by_torch(interpreted):
    assert set(interpreted["placed"].values()) == {True}


@needs_triton
def test_kernels_compile_for_gpus_from_turing_to_blackwell_as_they_are_launched(which):
    code = printed_by("compiled_kernels.py", *([] if which == "each" else [which]))
    assert {name.rpartition("_")[2] for name in code} == {"75", "80", "86", "89", "90", "120"}
    assert len(code) == {"each": 50, "pairs": 121, "all": 121 * 6 + 3 * 20}[which]
    assert all(size for size, _, _ in code.values())
    assert {name: shared for name, (_, shared, most) in code.items() if shared > most} == {}


def test_the_cpu_does_without_triton():
    assert not runs_triton(torch.zeros(1))
