"""The record of a run's machine."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.evals.environment import environment
from tests.support.devices import simulated_cuda


@pytest.mark.cuda
def test_the_gpu_is_the_one_that_the_model_is_on():
    with simulated_cuda(devices=2):
        assert environment(None, torch.device("cuda", 1))["gpu"] == "Simulated GPU 1"
        assert environment(None, torch.device("cpu"))["gpu"] == "Simulated GPU 0"
