"""The experts of a mixture whose weights are in DRAM, in a model that computes on a GPU.

Few rows are computed by the CPU: their hidden states and routing come to page-locked DRAM in one copy, the host waits
for that copy alone, and the result returns in one copy (KTransformers' placement of experts). Meanwhile the GPU
computes the shared expert. For many rows the weights that they need go to the GPU piece by piece, one piece ahead of
the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.graph_recording import allocating, computed_by_host, is_captured
from hetero_kv.adapter.routed_experts import Run, runs_of
from hetero_kv.adapter.shared_expert import SharedExpert
from hetero_kv.gpu_ops.host_copies import on_host
from hetero_kv.gpu_ops.pinned_bytes import Kind
from hetero_kv.gpu_ops.prefetch import Prefetch
from hetero_kv.gpu_ops.staging import Staging
from hetero_kv.weights.device_weight import UnpackRoom
from hetero_kv.weights.expert_weights import ExpertNumbers, ExpertWeights

if TYPE_CHECKING:
    from hetero_kv.adapter.quantized_experts import QuantizedExperts

#: Rows per expert, on average, beyond which weights go to the GPU. With R rows the CPU takes 2 R operations per weight,
#: and the bus b bytes: at 10^12 operations/s, 25 GB/s and 4.5 bits they are equal at 11 rows, with 16 bits at 40.
ROWS_PER_EXPERT = 16
_PIECE_BYTES = 64 << 20
_TENSORS_OF_PIECE = 6
_SLOTS = 2
# Numbers of rows whose buffers are kept.
_KEPT = 4


class ExpertTraffic:
    """Buffers for copies between DRAM and a GPU, shared by the experts of one model, which compute in turn."""

    def __init__(self) -> None:
        self._stagings: list[Staging] = []
        self._prefetches: dict[torch.device, Prefetch] = {}

    def staging(self, x: torch.Tensor, routing: Sequence[torch.Tensor]) -> Staging:
        """Buffers for hidden states and their routing, and for a result of the hidden states' shape."""
        down = [tuple(tensor.shape) for tensor in (x, *routing)]
        up = [tuple(x.shape)]
        found = next((each for each in self._stagings if each.fits(x.device, down, up)), None)
        if found is None:
            with allocating():
                found = Staging(x.device, down, up)
            self._stagings = [*self._stagings[1 - _KEPT :], found]
        return found

    def prefetch(self, device: torch.device) -> Prefetch:
        """Copies pieces of weights to `device`."""
        if device not in self._prefetches:
            self._prefetches[device] = Prefetch(device)
        return self._prefetches[device]


class ExpertsInDram:
    """Computes the output of a mixture's experts for rows on a GPU.

    Args:
        experts: owns the weights, which are in DRAM.
        block: the module that calls them.

    Attributes:
        shared: the block's shared expert, if it has one, once experts have been computed.
    """

    def __init__(self, experts: QuantizedExperts, traffic: ExpertTraffic, block: nn.Module) -> None:
        self._experts, self._traffic, self._block = experts, traffic, block
        self.shared: SharedExpert | None = None
        self._has_begun = False

    def end(self) -> None:
        """Restore what calls have changed in the block."""
        if self.shared is not None:
            self.shared.take_away()
        self.shared, self._has_begun = None, False

    def __call__(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        """The experts' output, as `QuantizedExperts.computed`, on x's device and in its dtype."""
        if not self._has_begun:
            self.shared, self._has_begun = SharedExpert.beside(self._block), True
        count = self._experts.wrapped.num_experts
        pairs = routing[0].numel() if routing else len(x) // count
        # A capture may have more rows than a token (`padded_inputs`), of which the CPU computes those in use.
        if pairs > ROWS_PER_EXPERT * count and not is_captured():
            if self.shared is not None:
                self.shared.follow()
            return self._streamed(x, *(routing or _every_expert(x, count)))
        staging = self._traffic.staging(x, routing)
        for room, tensor in zip(staging.rooms, (x, *routing), strict=True):
            room.copy_(tensor)
        return computed_by_host(_ByCPU(self, staging, x), x)

    def on_cpu(self, out: np.ndarray, dtype: torch.dtype, rows: np.ndarray, routing: Sequence[np.ndarray]) -> None:
        """Compute the experts' output by the CPU.

        Args:
            out, rows: [rows, hidden] float32.
            dtype: of the model, in which `rows` were computed.
            routing: float32, as of `QuantizedExperts.computed`.
        """
        routed = self._experts.routed
        if not routing:
            out[...] = self._experts.of_all_rows(torch.from_numpy(rows)).numpy()
            return
        chosen, shares = routing[0].astype(np.int64), routing[1]
        products = routed.products()
        if products is not None and rows.shape[0] <= routed.most_rows_of_codes(dtype):
            products.write(out, rows, chosen, shares)
            return
        # bfloat16 has its own products of many rows.
        x = torch.from_numpy(rows).to(dtype if dtype is torch.bfloat16 else torch.float32)
        out[...] = routed(x, torch.from_numpy(chosen), torch.from_numpy(shares)).float().numpy()

    def _streamed(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The experts' output, computed by the GPU from weights that arrive piece by piece."""
        experts, device = self._experts, x.device
        ids, order = chosen.reshape(-1).sort(stable=True)
        tokens, ordered = order // chosen.shape[1], shares.reshape(-1)[order].float()
        # The host waits for the sorted ids alone.
        runs = runs_of(on_host(ids)[0].tolist(), experts.wrapped.num_experts)
        weights = _Pieces(experts, device)
        numbered = [(number, list(part)) for number, part in groupby(runs, lambda run: run[2] // weights.experts_each)]
        out = torch.zeros(x.shape, dtype=torch.float32, device=device)
        queue = [(weights.kinds(number), _filling(weights.sources(number))) for number, _ in numbered]
        for (number, part), tensors in zip(numbered, self._traffic.prefetch(device).pieces(queue), strict=True):
            first = number * weights.experts_each
            moved: list[Run] = [(begin, end, expert - first) for begin, end, expert in part]
            experts.routed.add_runs(out, x, tokens, ordered, moved, weights.on_device(tensors))
        return out.to(x.dtype)


class _ByCPU:
    """Rows of one call that the CPU computes (`graph_recording.HostWork`)."""

    def __init__(self, owner: ExpertsInDram, staging: Staging, x: torch.Tensor) -> None:
        self._owner, self._staging = owner, staging
        shared = owner.shared
        self._shared = shared if shared is not None and shared.comes_after else None
        self._x, self._dtype = x if self._shared is not None else None, x.dtype

    @property
    def has_work_beside(self) -> bool:
        return self._shared is not None

    def send(self) -> None:
        self._staging.send_written()

    def beside(self) -> None:
        if self._shared is not None and self._x is not None:
            self._shared.launch(self._x)
            # A captured token does not need it any more.
            self._x = None

    def result(self, rows: int | None = None) -> torch.Tensor:
        arrays, out = self._staging.arrived(), self._staging.back[0]
        # Without routing an expert's rows follow another's.
        (x, *routing), out = ([each[:rows] for each in arrays], out[:rows]) if len(arrays) > 1 else (arrays, out)
        self._owner.on_cpu(out, self._dtype, x, routing)
        return self._staging.sent_back()[0]


class _Pieces:
    """The weights of experts in DRAM, in pieces of whole experts that follow each other."""

    def __init__(self, experts: QuantizedExperts, device: torch.device) -> None:
        self._experts = experts
        # Alive while the pieces' products use it.
        self._room = UnpackRoom.on(device)

    @cached_property
    def _whole(self) -> list[torch.Tensor]:
        """The tensors of all experts, [experts, …] each: weights of the projections in order, then biases."""
        experts = self._experts
        found: list[torch.Tensor] = []
        for leaf in experts.projections:
            parts = experts.parts_of(leaf)
            found += [weights.data for _, weights in parts] or [getattr(experts.wrapped, leaf).detach()]
        if experts.form.has_bias:
            found += [experts.biases_of(leaf).detach() for leaf in experts.projections]
        return found

    @cached_property
    def experts_each(self) -> int:
        """Experts of a piece, except for the last one."""
        return experts_of_piece(len(self._whole[0]), sum(tensor.nbytes for tensor in self._whole))

    def sources(self, number: int) -> list[torch.Tensor]:
        """A piece's tensors in DRAM."""
        first = number * self.experts_each
        return [tensor[first : first + self.experts_each] for tensor in self._whole]

    def kinds(self, number: int) -> list[Kind]:
        """Shapes and dtypes of a piece's tensors."""
        return [(tuple(tensor.shape), tensor.dtype) for tensor in self.sources(number)]

    def on_device(self, tensors: Sequence[torch.Tensor]) -> _PieceOnDevice:
        """A piece whose tensors have arrived."""
        return _PieceOnDevice(self._experts, tensors)


class _PieceOnDevice:
    """The weights of some experts on a GPU (`routed_experts.ExpertMatrices`)."""

    def __init__(self, experts: QuantizedExperts, tensors: Sequence[torch.Tensor]) -> None:
        left = iter(tensors)
        self._matrices: dict[str, list[tuple[slice, ExpertWeights | ExpertNumbers]]] = {}
        for leaf in experts.projections:
            packed = [
                (outputs, ExpertWeights(next(left), weights.name, *weights.shape))
                for outputs, weights in experts.parts_of(leaf)
            ]
            self._matrices[leaf] = [*packed] or [(slice(None), ExpertNumbers(experts.by_output(next(left))))]
        self._biases = dict(zip(experts.projections, left, strict=False))

    def matrices_of(self, leaf: str) -> Sequence[tuple[slice, ExpertWeights | ExpertNumbers]]:
        return self._matrices[leaf]

    def biases_of(self, leaf: str) -> torch.Tensor:
        return self._biases[leaf]


def experts_of_piece(count: int, size: int) -> int:
    """Experts whose weights go to the GPU as one piece, of `count` experts with `size` bytes in all."""
    return min(count, max(1, _PIECE_BYTES * count // max(size, 1)))


def room_for_pieces(count: int, size: int) -> int:
    """The GPU's memory for pieces on their way, bytes; of `count` experts with `size` bytes in all."""
    return _SLOTS * (experts_of_piece(count, size) * -(-size // count) + 16 * _TENSORS_OF_PIECE)


def _every_expert(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and shares of rows of a form that takes all rows: each expert's tokens follow each other."""
    chosen = torch.arange(count, device=x.device).repeat_interleave(len(x) // count)[:, None]
    return chosen, torch.ones_like(chosen, dtype=x.dtype)


def _filling(sources: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], None]:
    def fill(tensors: Sequence[torch.Tensor]) -> None:
        for tensor, source in zip(tensors, sources, strict=True):
            tensor.copy_(source)

    return fill
