"""Pieces cross the bus next to the GPU's work, two at a time, in page-locked memory."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.gpu_ops.pinned_bytes import PinnedBytes
from hetero_kv.gpu_ops.prefetch import Prefetch
from hetero_kv.gpu_ops.write_out import WriteOut
from tests.support.devices import simulated_cuda
from tests.support.simulated_cuda import SimulatedCudaError
from tests.support.simulated_cuda.streams import Event

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)


def written(write_out, count, arrived):
    """Have `count` pieces of a tensor sent that is written to again at once."""
    source = torch.zeros(3, 5, device=DEVICE)
    for number in range(count):
        source.fill_(float(number))
        write_out.send((source[:, 1:], source[0].to(torch.float16)), lambda copies: arrived.append([*copies]))


def test_pieces_arrive_in_order_with_two_in_flight(gpu):
    arrived, write_out = [], WriteOut(DEVICE)
    gpu.record.clear()
    written(write_out, 2, arrived)
    assert (arrived, gpu.record.waits) == ([], [])
    kept = []
    written(write_out, 3, kept)
    assert len(gpu.record.waits) == 3
    write_out.finish()
    assert len(gpu.record.waits) == 5
    assert [(len(pieces), pieces[0][0].shape, pieces[0][1].dtype) for pieces in (arrived, kept)] == [
        (2, (3, 4), torch.float16),
        (3, (3, 4), torch.float16),
    ]
    assert not gpu.record.pageable
    assert not any(copy.is_blocking for copy in gpu.record.copies)


def test_each_piece_has_the_numbers_of_its_time(gpu):
    found, write_out = [], WriteOut(DEVICE)
    source = torch.zeros(4, device=DEVICE)
    for number in range(5):
        source.fill_(float(number))
        write_out.send((source,), lambda copies: found.append(copies[0].tolist()))
    write_out.finish()
    assert found == [[float(number)] * 4 for number in range(5)]


def test_dropped_pieces_are_not_delivered(gpu):
    arrived, write_out = [], WriteOut(DEVICE)
    written(write_out, 2, arrived)
    write_out.drop()
    write_out.finish()
    assert arrived == []


def write_without_waiting(found):
    with simulated_cuda():
        write_out = WriteOut(DEVICE)
        write_out.send((torch.ones(4, device=DEVICE),), lambda copies: found.append(bool(copies[0].isnan().all())))
        write_out.finish()


def test_a_piece_that_is_not_waited_for_is_seen(monkeypatch):
    found = []
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    # And the device's memory goes while it is still being copied.
    with pytest.raises(SimulatedCudaError, match="freed while another stream"):
        write_without_waiting(found)
    assert found == [True]


def pieces_of(prefetch, numbers):
    """Sums of pieces that are filled with these numbers."""
    kinds = [((2, 3), torch.float32), ((5,), torch.uint8)]

    def filling(number):
        def fill(host):
            for tensor in host:
                tensor.fill_(number)

        return fill

    for first, second in prefetch.pieces([(kinds, filling(number)) for number in numbers]):
        yield float(first.sum()) / 6, int(second.sum()) // 5


def test_pieces_come_in_order_one_ahead(gpu):
    prefetch = Prefetch(DEVICE)
    assert list(pieces_of(prefetch, [])) == []
    for numbers in (range(1, 2), range(1, 8), range(3, 5)):
        gpu.record.clear()
        assert list(pieces_of(prefetch, numbers)) == [(number, number) for number in numbers]
        assert all(copy.is_pinned for copy in gpu.record.copies if copy.to_device)
        assert not any(copy.is_blocking for copy in gpu.record.copies if copy.to_device)


def test_two_pieces_are_on_the_device(gpu):
    prefetch, kind = Prefetch(DEVICE), [((1000,), torch.float32)]
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    total = torch.zeros(1000, device=DEVICE)
    # As of the chunks of a prompt, one after the other, without a wait for what is computed.
    for _ in range(3):
        for (piece,) in prefetch.pieces([(kind, lambda host: host[0].fill_(1.0))] * 16):
            total.add_(piece)
        del piece
    # The one that is used and the one that comes, however late what is computed with them is done.
    assert torch.cuda.max_memory_allocated(DEVICE) - before == 4000 + 2 * 4000
    assert torch.cuda.memory_allocated(DEVICE) - before == 4000
    assert total.tolist() == [48.0] * 1000


def test_pieces_that_nobody_takes_to_the_end_are_let_go_of(gpu):
    prefetch, kind = Prefetch(DEVICE), [((1000,), torch.float32)]
    before = torch.cuda.memory_allocated(DEVICE)
    requests = [(kind, lambda host: host[0].fill_(2.0))] * 3
    pieces = prefetch.pieces(requests)
    total = next(pieces)[0] + 1
    pieces.close()
    assert torch.cuda.memory_allocated(DEVICE) - before == 4000
    assert [float(piece.mean()) for (piece,) in prefetch.pieces(requests)] == [2.0] * 3
    assert total.tolist() == [3.0] * 1000


def fill_without_waiting():
    with simulated_cuda():
        for _ in Prefetch(DEVICE).pieces([([((4,), torch.float32)], lambda host: host[0].normal_())] * 4):
            pass


def test_page_locked_memory_is_filled_when_its_copy_is_done():
    # Otherwise the simulated device raises an error: only the filling thread waits here.
    fill_without_waiting()


def test_page_locked_memory_that_is_filled_too_early_is_seen(monkeypatch):
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    with pytest.raises(SimulatedCudaError, match="host memory was written while a copy"):
        fill_without_waiting()


def test_room_grows_and_holds_tensors_of_any_kind_side_by_side(gpu):
    room = PinnedBytes()
    a, b, none = room.of([((3,), torch.uint8), ((2, 2), torch.float32), ((0, 4), torch.float16)])
    a.fill_(7)
    b.fill_(1.0)
    assert (a.tolist(), b.tolist(), none.shape) == ([7] * 3, [[1.0] * 2] * 2, (0, 4))
    assert all(tensor.is_pinned() for tensor in (a, b))
    before = gpu.pinned.nbytes
    room.of([((8,), torch.uint8)])
    assert gpu.pinned.nbytes == before
    assert room.of([((100,), torch.int64)])[0].is_pinned()
