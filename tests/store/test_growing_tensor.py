"""A growing tensor equals a list, through growth, cuts, forks and steps back."""

from __future__ import annotations

import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.store.growing_tensor import GrowingTensor

OPERATIONS = st.tuples(st.sampled_from(["append", "drop", "truncate", "fork", "undo", "replace"]), st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=40), slack=st.sampled_from([0, 3, 50]))
def test_a_growing_tensor_and_its_forks_hold_what_lists_hold(operations, slack):
    tensors, lists, fresh = [GrowingTensor(1, slack)], [[]], 0
    tensors[0].append(torch.empty(2, 0))
    for operation, number in operations:
        at = number % len(tensors)
        tensor, expected = tensors[at], lists[at]
        new = list(range(fresh, fresh + number))
        fresh += number
        entries = torch.tensor([new, new], dtype=torch.float32)
        if operation == "append":
            tensor.append(entries)
            expected += new
        elif operation == "replace":
            tensor.replace(entries)
            expected[:] = new
        elif operation == "drop":
            tensor.drop_first(min(number, len(expected)))
            del expected[: min(number, len(expected))]
        elif operation == "truncate":
            tensor.truncate(min(number, len(expected)))
            del expected[min(number, len(expected)) :]
        elif operation == "fork":
            tensors.append(tensor.fork())
            lists.append(list(expected))
        else:
            checkpoint = tensor.checkpoint()
            tensor.append(entries)
            tensor.drop_first(min(2, len(tensor)))
            tensor.append(entries)
            tensor.restore(checkpoint)
    for tensor, expected in zip(tensors, lists, strict=True):
        assert len(tensor) == len(expected)
        assert tensor.entries.tolist() == [expected, expected]


def test_growing_by_one_copies_the_rest_only_now_and_then():
    tensor, buffers = GrowingTensor(0, 100), set()
    for index in range(300):
        tensor.append(torch.tensor([float(index)]))
        buffers.add(tensor.entries.untyped_storage().data_ptr())
    assert tensor.entries.tolist() == list(range(300))
    assert len(buffers) <= 3


def test_a_checkpoint_follows_to_a_larger_buffer_and_the_smaller_one_is_freed():
    tensor = GrowingTensor(0, 2)
    tensor.append(torch.arange(5.0))
    tensor.drop_first(2)
    checkpoints, small = [tensor.checkpoint(), tensor.checkpoint()], weakref.ref(tensor.extent[0])
    for _ in range(3):
        tensor.append(torch.arange(10.0, 20))
    assert small() is None
    for checkpoint in checkpoints:
        tensor.restore(checkpoint)
        assert tensor.entries.tolist() == [2, 3, 4]


def test_a_checkpoint_stays_where_the_larger_buffer_lacks_some_of_its_entries():
    tensor = GrowingTensor(0, 0)
    tensor.append(torch.arange(5.0))
    checkpoint = tensor.checkpoint()
    tensor.drop_first(1)
    tensor.append(torch.arange(10.0, 20))
    tensor.restore(checkpoint)
    assert tensor.entries.tolist() == [0, 1, 2, 3, 4]
    tensor.truncate(3)
    tensor.append(torch.arange(10.0, 20))
    tensor.restore(checkpoint)
    assert tensor.entries.tolist() == [0, 1, 2, 3, 4]


def test_a_checkpoint_does_not_follow_a_fork():
    tensor = GrowingTensor(0, 0)
    tensor.append(torch.arange(5.0))
    checkpoint, fork = tensor.checkpoint(), tensor.fork()
    fork.append(torch.arange(10.0, 20))
    fork.truncate(0)
    fork.append(torch.arange(20.0, 30))
    tensor.restore(checkpoint)
    tensor.append(torch.tensor([7.0]))
    assert tensor.entries.tolist() == [0, 1, 2, 3, 4, 7]
    assert fork.entries.tolist() == [*range(20, 30)]
