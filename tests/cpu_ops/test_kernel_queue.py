"""Queued kernels: their order, their arguments, results and errors."""

import numpy as np
import pytest
from numba import njit, types

from hetero_kv.cpu_ops import kernel_queue
from hetero_kv.cpu_ops.kernel_queue import KernelQueue, prepare_queued

ARRAY = types.Array(types.float32, 2, "C")


@njit(types.float64(ARRAY, types.Tuple([ARRAY, types.none]), types.float32, types.boolean, types.int64))
def scaled_into(x, outputs, factor, negates, added):
    """Writes factor * x + added, or its negative; returns the first number of the result."""
    out = outputs[0]
    out[:] = x * factor + added
    if negates:
        out[:] = -out
    return np.float64(out[0, 0])


@njit(types.void(types.Array(types.float32, 2, "A"), ARRAY))
def copied(x, out):
    out[:] = x


def numbers(value=0.0):
    return np.full((2, 3), value, np.float32)


def add(queue, x, out, factor=2.0, negates=False, added=0, check=None):
    queue.add(scaled_into, x, (out, None), np.float32(factor), negates, added, check=check)


def test_calls_wait_and_are_made_in_their_order():
    queue, x, first, second = KernelQueue(), numbers(3), numbers(), numbers()
    add(queue, x, first)
    add(queue, first, second, added=1)
    assert not first.any()
    queue.run()
    assert (first == 6).all()
    assert (second == 13).all()


def test_a_queue_is_used_again_and_an_empty_one_does_nothing():
    queue, x = KernelQueue(), numbers(1)
    for _ in range(3):
        add(queue, x, x)
        queue.run()
    queue.run()
    assert (x == 8).all()


def test_arguments_without_another_reference_outlive_the_call():
    queue, out = KernelQueue(), numbers()
    for each in range(50):
        add(queue, numbers(each), out)
    queue.run()
    assert (out == 98).all()


def test_arrays_of_another_layout_are_converted_as_in_a_call():
    queue, out = KernelQueue(), numbers()
    queue.add(copied, np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2], out)
    queue.add(copied, out, out)
    queue.run()
    assert out.tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.parametrize("x", [np.zeros((2, 3)), np.zeros(3, np.float32), 1.0, None])
def test_other_types_are_refused(x):
    queue, out = KernelQueue(), numbers()
    with pytest.raises(TypeError):
        add(queue, x, out)


def test_results_other_than_0_are_checked_after_the_run():
    queue, out, seen = KernelQueue(), numbers(), []
    for value in (0, 1, 2):
        add(queue, numbers(value), out, check=seen.append)
    queue.run()
    assert seen == [2, 4]


def test_a_negative_result_ends_the_run():
    queue, x, out, after, seen = KernelQueue(), numbers(1), numbers(), numbers(), []
    add(queue, x, out, negates=True, check=seen.append)
    add(queue, x, after, check=seen.append)
    queue.run()
    assert seen == [-2]
    assert not after.any()


def test_an_error_leaves_an_empty_queue():
    def refuse(result):
        raise ValueError(f"it is {result}")

    queue, x, out = KernelQueue(), numbers(1), numbers()
    add(queue, x, out, check=refuse)
    add(queue, x, x)
    with pytest.raises(ValueError, match=r"it is 2\.0"):
        queue.run()
    queue.run()
    assert (x == 2).all()


@pytest.mark.parametrize(("name", "value"), [("_CALLS", 4), ("_BYTES", (1 << 14) + 500)])
def test_a_full_queue_is_run(name, value, monkeypatch):
    monkeypatch.setattr(kernel_queue, name, value)
    monkeypatch.setattr(kernel_queue, "_FREE", [])
    queue, x = KernelQueue(), numbers(1)
    for _ in range(9):
        add(queue, x, x)
    assert (x > 1).all()
    queue.run()
    assert (x == 512).all()


def test_a_prepared_kernel_is_not_compiled_when_it_is_queued():
    @njit(types.void(types.Array(types.int16, 1, "C"), types.UniTuple(types.int64, 2)))
    def filled(out, numbers):
        out[:] = numbers[0] + numbers[1]

    prepare_queued(filled)
    put = kernel_queue._queued(filled).put
    before, out, queue = len(put.overloads), np.zeros(2, np.int16), KernelQueue()
    queue.add(filled, out, (3, 4))
    queue.run()
    assert out.tolist() == [7, 7]
    assert len(put.overloads) == before
