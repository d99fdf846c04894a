"""The simulated device captures what a GPU captures, refuses what it refuses, and replays on the same addresses."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv.gpu_ops.graph_segments import GraphSegments
from hetero_kv.gpu_ops.merge import merge_attention
from tests.support.devices import simulated_cuda
from tests.support.simulated_cuda import Launch, SimulatedCudaError

pytestmark = pytest.mark.cuda


@pytest.fixture
def gpu():
    with simulated_cuda() as simulation:
        yield simulation


def captured(work):
    """Segments of one, and what `work` gave while it was captured."""
    segments = GraphSegments(torch.device("cuda", 0))
    with segments.captured():
        made = work()
    return segments, made


def test_nothing_runs_while_it_is_captured_and_all_of_it_when_it_is_launched(gpu):
    ours, counter = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def work():
        counter.add_(1)
        return (ours * 2 + counter).relu()

    segments, made = captured(work)
    assert made.isnan().all()
    assert counter.tolist() == [0.0] * 4
    gpu.record.clear()
    segments.launch(0)
    assert [each.name for each in gpu.record.everything if isinstance(each, Launch)] == ["graph"]
    assert made.tolist() == [3.0] * 4
    ours.fill_(-7.0)
    segments.launch(0)
    assert (made.tolist(), counter.tolist()) == ([0.0] * 4, [2.0] * 4)


def test_work_between_two_segments_sees_the_one_and_is_seen_by_the_other(gpu):
    ours, out = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    segments = GraphSegments(torch.device("cuda", 0))
    with segments.captured():
        first = ours + 1
        residual = first * 10
        with segments.interrupted():
            pass
        last = residual + out
    assert len(segments) == 2
    del residual
    for number in (1.0, 2.0):
        ours.fill_(number)
        segments.launch(0)
        out.copy_(first * 100)
        segments.launch(1)
        assert last.tolist() == [110 * (number + 1)] * 4


def test_kernels_of_triton_and_indices_are_captured(gpu):
    pytest.importorskip("triton")
    parts = [torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)] * 2
    ours, places = [part.to("cuda") for part in parts], torch.tensor([1, 0], device="cuda")
    expected = merge_attention(*parts)[0][:, [1, 0]]
    merge_attention(*ours)
    segments, made = captured(lambda: merge_attention(*ours)[0][:, places])
    segments.launch(0)
    assert torch.allclose(made.cpu(), expected, atol=1e-6)


@pytest.mark.parametrize(
    "refused",
    [
        lambda ours: ours.sum().item(),
        lambda ours: ours.cpu(),
        lambda ours: ours.copy_(torch.ones(4), non_blocking=True),
        lambda ours: ours[ours > 0],
        lambda ours: torch.empty(4, pin_memory=True),
        lambda ours: torch.cuda.synchronize(),
        lambda ours: torch.cuda.Event().record(),
    ],
)
def test_uncapturable_operations_are_refused_and_the_device_stays_usable(gpu, refused):
    ours = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: refused(ours.mul_(2)))
    assert (ours + 1).tolist() == [2.0] * 4


def test_the_devices_own_stream_is_not_captured(gpu):
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_a_graph_whose_memory_was_let_go_is_an_error(gpu):
    inputs = [torch.ones(4, device="cuda")]
    segments, _ = captured(lambda: inputs[0] + 1)
    segments.launch(0)
    inputs.clear()
    with pytest.raises(SimulatedCudaError, match="freed since it was captured"):
        segments.launch(0)


def capture_in_two(segments, work):
    with segments.captured():
        work()
        with segments.interrupted():
            pass


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupt_while_a_capture_begins_ends_it(gpu, monkeypatch, segment, when):
    begin, begun = torch.cuda.CUDAGraph.capture_begin, []

    def interrupted(graph, **settings):
        begun.append(graph)
        if len(begun) == segment + 1 and when == "before":
            raise KeyboardInterrupt
        begin(graph, **settings)
        if len(begun) == segment + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", interrupted)
    ours, segments = torch.ones(4, device="cuda"), GraphSegments(torch.device("cuda", 0))
    with pytest.raises(KeyboardInterrupt):
        capture_in_two(segments, lambda: ours.add_(1))
    assert not torch.cuda.is_current_stream_capturing()
    assert gc.isenabled()
    assert (ours + 1).tolist() == [2.0] * 4


def test_a_capture_that_fails_is_over_for_the_allocator_and_the_generator_too(gpu):
    segments, ours = GraphSegments(torch.device("cuda", 0)), torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), segments.captured():
        ours.sum().item()
    assert not gpu.memory.underway
    assert not +gpu.memory.pools
    torch.rand(1, device="cuda")


def test_the_simulated_allocator_and_generator_stay_in_a_capture_that_failed(gpu):
    graph, ours = torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda")
    ours.record_stream(torch.cuda.Stream())
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool)
        for end in (ours.tolist, graph.capture_end):
            with pytest.raises(RuntimeError, match="CUDA error"):
                end()
    with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
        torch.rand(1, device="cuda")
    del ours, end
    assert torch.cuda.memory_allocated() == 4000
    torch._C._cuda_endAllocateToPool(0, pool)
    assert torch.cuda.memory_allocated() == 0


def test_graphs_have_none_of_the_memory_that_torch_keeps():
    with simulated_cuda(total=10_000) as gpu:
        torch.empty(8_000, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info() == (2_000, 10_000)
        torch.empty(9_000, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 9_000
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(11_000, dtype=torch.uint8, device="cuda")
        torch.empty(9_000, dtype=torch.uint8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(9_000, dtype=torch.uint8, device="cuda")
            graph.capture_end()
        torch.cuda.empty_cache()
        assert gpu.memory.reserved(0) == 0
