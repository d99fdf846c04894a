"""Host waits and bus copies are recorded with the line that causes them, and run as usual."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from hetero_kv.gpu_ops.host_traffic import traffic_observed

pytestmark = pytest.mark.cuda


def pinned():
    return torch.ones(4).pin_memory()


CROSSING = "copies from or to the device"


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        (lambda ours: ours.sum().item(), "waits for the device"),
        (lambda ours: bool((ours > 1).any()), "waits for the device"),
        (lambda ours: ours[ours > 1], "waits for the device"),
        (lambda ours: ours.nonzero(), "waits for the device"),
        (lambda ours: ours.cpu(), "waits for the device"),
        (lambda ours: torch.ones(4).to("cuda"), "waits for the device"),
        (lambda ours: torch.cuda.current_stream().synchronize(), "waits for the device"),
        (lambda ours: pinned().to("cuda", non_blocking=True), CROSSING),
        (lambda ours: ours.copy_(pinned(), non_blocking=True), CROSSING),
        (lambda ours: torch.empty(4, pin_memory=True), "page-locks memory"),
    ],
)
def test_uncapturable_operations_are_recorded_with_their_line(gpu, operation, what):
    ours = torch.ones(4, device="cuda")
    with traffic_observed() as traffic:
        ours.add_(1)
        operation(ours)
        ours.sum().item()
    assert traffic.first == f"{what} (test_host_traffic.py:{operation.__code__.co_firstlineno})"


def test_device_work_is_not_recorded_and_exempt_waits_are_not_either(gpu):
    ours = torch.ones(4, device="cuda")
    with traffic_observed() as traffic:
        made = (ours * 2).relu().to(torch.bfloat16)
        ours.copy_(made)
        with traffic.unobserved():
            assert ours.sum().item() == 8
            torch.ones(4).to("cuda")
    assert traffic.first is None


def test_other_threads_may_wait(gpu):
    ours = torch.ones(4, device="cuda")
    with traffic_observed() as traffic:
        other = threading.Thread(target=ours.tolist)
        other.start()
        other.join()
    assert traffic.first is None


def warned_of_and_broken_off(ours):
    with traffic_observed():
        warnings.warn("of something else", stacklevel=1)
        raise ZeroDivisionError(ours.sum().item())


@pytest.mark.parametrize("before", [0, 1])
def test_warnings_are_afterwards_what_they_were_and_others_are_seen_meanwhile(gpu, before):
    ours = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode(before)
    with warnings.catch_warnings(record=True) as seen:
        state = warnings.showwarning, list(warnings.filters)
        with pytest.raises(ZeroDivisionError):
            warned_of_and_broken_off(ours)
        assert state == (warnings.showwarning, list(warnings.filters))
    assert [str(each.message) for each in seen] == ["of something else"]
    assert torch.cuda.get_sync_debug_mode() == before
