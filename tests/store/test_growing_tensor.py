"""A growing tensor holds what a list would, through growth, cuts, forks and steps back."""

from __future__ import annotations

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
        tensor, held = tensors[at], lists[at]
        new = list(range(fresh, fresh + number))
        fresh += number
        entries = torch.tensor([new, new], dtype=torch.float32)
        if operation == "append":
            tensor.append(entries)
            held += new
        elif operation == "replace":
            tensor.replace(entries)
            held[:] = new
        elif operation == "drop":
            tensor.drop_first(min(number, len(held)))
            del held[: min(number, len(held))]
        elif operation == "truncate":
            tensor.truncate(min(number, len(held)))
            del held[min(number, len(held)) :]
        elif operation == "fork":
            tensors.append(tensor.fork())
            lists.append(list(held))
        else:
            checkpoint = tensor.checkpoint()
            tensor.append(entries)
            tensor.drop_first(min(2, len(tensor)))
            tensor.restore(checkpoint)
    for tensor, held in zip(tensors, lists, strict=True):
        assert len(tensor) == len(held)
        assert tensor.entries.tolist() == [held, held]


def test_growing_by_one_copies_the_rest_only_now_and_then():
    tensor, buffers = GrowingTensor(0, 100), set()
    for index in range(300):
        tensor.append(torch.tensor([float(index)]))
        buffers.add(tensor.entries.untyped_storage().data_ptr())
    assert tensor.entries.tolist() == list(range(300))
    assert len(buffers) <= 3
