"""The benchmark of sparse prefill times prompts and the attention within them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sparse_prefill import DENSE, measured
from tests.support.tiny_models import tiny_model


@pytest.mark.slow  # compiles another kernel
def test_a_prefills_attention_is_a_part_of_its_time():
    model = tiny_model("qwen2")
    found = measured(model, ["flexprefill"], torch.randint(2, 97, (1, 70)), repeats=1)
    assert [*found] == [DENSE, "flexprefill"]
    assert all(0 < run.attention < run.cpu for run in found.values())
    assert getattr(model, "hetero_kv_injection", None) is None
