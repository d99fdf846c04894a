"""Top-k selection equals a stable sort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.top_k import top_k_blocks

special = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 2.0])
scores = st.lists(special | st.floats(-10, 10, width=32), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(row=scores, k=st.integers(0, 45), data=st.data())
def test_top_k_equals_a_stable_sort_with_nan_lowest(row, k, data):
    count = data.draw(st.integers(0, len(row)))
    order = sorted(range(count), key=lambda i: (np.isnan(row[i]), -row[i] if not np.isnan(row[i]) else 0, i))
    expected = sorted(order[:k])
    indices, taken = top_k_blocks(np.array([row, row], np.float32), np.array([count, 0], np.int32), k)
    assert taken.tolist() == [len(expected), 0]
    assert indices.tolist() == [expected + [-1] * (k - len(expected)), [-1] * k]


@pytest.mark.parametrize(
    ("shape", "counts", "k", "message"),
    [((3,), [3], 1, "scores"), ((1, 3), [3], -1, "k is -1"), ((1, 3), [4], 1, "counts range over 4..4")],
)
def test_bad_arguments_are_named(shape, counts, k, message):
    with pytest.raises(ValueError, match=message):
        top_k_blocks(np.zeros(shape, np.float32), np.array(counts, np.int32), k)
