"""Small copies between the CPU and a device."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.gpu_ops.host_copies import on_device, on_host
from tests.support.devices import simulated_cuda


def test_numbers_go_there_and_back(device):
    tensors = torch.arange(6).view(2, 3), torch.tensor(1.5)
    there = [on_device(each, device) for each in tensors]
    assert all(each.device == device for each in there)
    for back, each in zip(on_host(*there), tensors, strict=True):
        assert torch.equal(back, each)


@pytest.mark.cuda
def test_the_host_waits_once_for_all_and_not_at_all_on_the_way_there():
    with simulated_cuda() as gpu:
        there = [on_device(torch.ones(count), torch.device("cuda", 0)) for count in (2, 3)]
        assert gpu.record.waits == []
        on_host(*there)
        assert len(gpu.record.waits) == 1
        assert [(copy.is_pinned, copy.is_blocking) for copy in gpu.record.copies] == [(True, False)] * 4
