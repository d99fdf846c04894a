"""The experts of a mixture with quantized weights: a token reads only the experts that it is routed to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.declarations import QUANTIZED_EXPERTS
from hetero_kv.adapter.expert_products import ExpertProducts
from hetero_kv.adapter.foreign import foreign_part
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.weights.expert_weights import (
    ExpertWeights,
    chooses_on_device,
    multiply_experts,
    multiply_experts_of_rows,
)
from hetero_kv.weights.packed_weight import FEW_ROWS
from hetero_kv.weights.quantized_weight import bytes_tensor, most_rows_of_codes

if TYPE_CHECKING:
    from hetero_kv.weights.tensor_types import TensorType

_logger = logging.getLogger(__name__)
# The trial of the kernels for few rows: rows, experts of a row, and the difference of norms that rounding explains.
_TRIED_ROWS, _TRIED_EXPERTS, _TOLERANCE = 3, 4, 5e-3
# Pairs of a row and an expert whose numbers are in memory at a time.
_PAIRS_AT_ONCE = 4096
# The outputs of gate and up projections of which one follows the other, output by output.
_ALTERNATING = slice(0, None, 2), slice(1, None, 2)
_FORM = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")


class QuantizedExperts(QuantizedModule):
    """The experts of a mixture: modules of transformers' experts interface, such as Mixtral's, Qwen's and gpt-oss's.

    Few rows of an expert are multiplied with its codes, all experts in one call (`ExpertProducts`), if that gives what
    the wrapped module gives. If an expert gets more rows of a prompt, its weights are unpacked, one expert at a time,
    and the wrapped module computes the step between the two projections.

    Attributes:
        parts: projection -> slices of its outputs, and their weights: one for the whole projection, or gate and up
            separately as in a GGUF file. Empty while the wrapped module has unpacked weights.
    """

    meaning = QUANTIZED_EXPERTS.meaning

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.projections = ("gate_up_proj" if wrapped.has_gate else "up_proj", "down_proj")
        first = getattr(wrapped, self.projections[0])
        self.dtype: torch.dtype = first.dtype
        #: Projection -> [experts, outputs, inputs], also if the module stores the transpose.
        self.shapes = {leaf: tuple(self._by_output(getattr(wrapped, leaf)).shape) for leaf in self.projections}
        self.parts: dict[str, list[tuple[slice, ExpertWeights]]] = {leaf: [] for leaf in self.projections}
        self._products: ExpertProducts | None = None
        #: What the kernels for few rows were tried with.
        self._tried_with: list[Any] = []

    @classmethod
    def applies(cls, module: Any, settings: Any) -> bool:
        """See `QuantizedModule`; does not apply to a list of separate expert modules."""
        return (
            all(hasattr(module, name) for name in _FORM)
            and not getattr(module, "_is_expert_parallel", False)
            and super().applies(module, settings)
        )

    @classmethod
    def parameter_of(cls, module: Any) -> nn.Parameter:
        return module.down_proj

    def install(self) -> None:
        super().install()
        for leaf in self.projections:
            if self.parts[leaf]:
                self._give(leaf, self._nothing(leaf))
        numbers = {leaf: getattr(self.wrapped, leaf).detach() for leaf in self.projections if not self.parts[leaf]}
        if any(tensor.is_meta for tensor in numbers.values()) or not numbers:
            return
        kept_types = [self.kept_as(None, self.shapes[leaf][2]) for leaf in numbers]
        for leaf, name in zip(list(numbers), kept_types, strict=True):
            tensor = numbers.pop(leaf)
            if name is None or None in kept_types:
                self._give(leaf, self.converted(tensor, self.shapes[leaf][2]))
                continue
            self.require_kernels(tensor.device)
            alternates = leaf == self.projections[0] and self.wrapped.has_gate and not self.wrapped.is_concatenated
            for outputs in _ALTERNATING if alternates else [slice(None)]:
                self._keep(leaf, outputs, ExpertWeights.of_numbers(self._by_output(tensor)[:, outputs], name))

    def uninstall(self) -> nn.Module:
        for leaf in self.projections:
            if self.parts[leaf]:
                self._give(leaf, self._unpacked(leaf))
            elif not (parameter := getattr(self.wrapped, leaf)).is_meta and parameter.dtype is not self.dtype:
                self._give(leaf, parameter.detach().to(self.dtype))
        return super().uninstall()

    def compile_own_kernels(self) -> None:
        for weights in self.packed_weights():
            weights.experts[0].compile_kernels(self.dtype)
        if all(weights.data.device.type == "cpu" for weights in self.packed_weights()):
            self.products()

    def packed_weights(self) -> Iterator[ExpertWeights]:
        return (weights for leaf in self.projections for _, weights in self._parts(leaf))

    def packed_shapes(self, stored: Mapping[str, str]) -> Iterator[tuple[int, int]]:
        for leaf, (_, rows, columns) in self.shapes.items():
            is_meta = getattr(self.wrapped, leaf).is_meta
            kept = self._kept(leaf, stored) if is_meta else [weights.name for _, weights in self.parts[leaf]]
            yield from ((rows // len(kept), columns) for name in kept if name is not None)

    def _kept(self, leaf: str, stored: Mapping[str, str]) -> list[str | None]:
        """The types of a projection's parts; see `kept_as`."""
        place, columns = f"{self.path}.{leaf}", self.shapes[leaf][2]
        names: list[str | None] = [stored[f"{place}.{part}"] for part in ("gate", "up") if f"{place}.{part}" in stored]
        return [self.kept_as(name, columns) for name in names or [stored.get(place)]]

    def expect_weights_in(self, module: Any) -> None:
        for leaf, (experts, rows, columns) in self.shapes.items():
            shape = (experts, columns, rows) if self.wrapped.is_transposed else (experts, rows, columns)
            empty = torch.empty(shape, dtype=self.dtype, device="meta")
            module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)

    def share_weights(self, other: QuantizedExperts) -> None:
        for leaf in self.projections:
            parts = other._parts(leaf)
            for outputs, weights in parts:
                self._keep(leaf, outputs, weights)
            if not parts:
                self.wrapped._parameters[leaf] = getattr(other.wrapped, leaf)

    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        sizes = {}
        for leaf, (experts, rows, columns) in self.shapes.items():
            kept = self._kept(leaf, stored)
            share = rows // len(kept)
            sizes[id(getattr(self.wrapped, leaf))] = experts * sum(
                FORMATS[name].packed_bytes(share, columns)
                if name is not None
                else share * columns * self.number_type(dtype).itemsize
                for name in kept
            )
        return sizes

    def load_experts(
        self, leaf: str, outputs: slice, blocks: np.ndarray, kind: TensorType, shape: tuple[int, ...]
    ) -> str | None:
        """Take some or all outputs of a projection from a GGUF file; returns the type that replaces theirs.

        Args:
            leaf: the projection's parameter.
            outputs: the outputs that the blocks belong to.
            blocks: [experts, outputs, bytes of a row] uint8, the file's blocks.
            kind: their type.
            shape: [experts, outputs, inputs].
        """
        # Imported here, since only files of blocks need the package gguf.
        from hetero_kv.weights.block_numbers import numbers_of_blocks

        parameter_dtype = self.kept_as(kind.name, shape[2])
        if self.keeps_as_stored(kind.name, shape[2]):
            self._keep(leaf, outputs, ExpertWeights.of_blocks(blocks, kind.name, shape[2]))
            return None
        unpacked = np.require(numbers_of_blocks(blocks, kind), requirements=["W"])
        numbers = torch.from_numpy(unpacked).reshape(shape)
        if parameter_dtype is not None:
            self._keep(leaf, outputs, ExpertWeights.of_numbers(numbers, parameter_dtype))
            return self.substituted(kind.name, parameter_dtype, shape[2])
        if getattr(self.wrapped, leaf).is_meta:
            self._give(leaf, torch.empty(getattr(self.wrapped, leaf).shape, dtype=self.number_type()))
        self._by_output(getattr(self.wrapped, leaf).data)[:, outputs] = numbers.to(self.number_type())
        return self.substituted(kind.name, parameter_dtype, shape[2])

    def load_packed(self, leaf: str, outputs: slice, data: np.ndarray, name: str, shape: tuple[int, ...]) -> None:
        """Take weights that were packed as they are stored: `data`, [bytes] uint8; see `load_experts`."""
        experts, rows, columns = shape
        self._keep(leaf, outputs, ExpertWeights(bytes_tensor(data).view(experts, -1), name, rows, columns))

    def computed(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """x: hidden states [tokens, hidden]. chosen, shares: each token's experts and their weights, [tokens, k]."""
        if not all(self.parts.values()):
            return self._in_numbers(x, chosen, shares)
        for leaf in self.projections:
            self.require_empty(leaf)
        if chooses_on_device(x, chosen.numel(), self.packed_weights()):
            return self._decoded(x, chosen, shares)
        products = self.products() if x.device.type == "cpu" else None
        if products is None:
            return self._run_by_run(x, chosen, shares)
        most = self.most_rows_of_codes(x.dtype)
        if len(x) <= most:
            return products.output(x, chosen, shares).to(x.dtype)
        counts = chosen.flatten().bincount(minlength=self.wrapped.num_experts + 1)[: self.wrapped.num_experts]
        return self._in_parts(products, x, chosen, shares, counts, most)

    def products(self) -> ExpertProducts | None:
        """The arguments of the kernels for few rows; None if the experts' form has none, or the results differ."""
        module = self.wrapped
        settings = [getattr(module, name, None) for name in ("act_fn", "alpha", "limit", "has_bias", "training")]
        present = [
            *(weights.data.data_ptr() for leaf in self.projections for _, weights in self._parts(leaf)), *settings,
            *(bias.data_ptr() for bias in module._parameters.values() if bias is not None), module._apply_gate,
            self._has_foreign_step,
        ]  # fmt: skip
        if present != self._tried_with:
            self._products = self._tried_products()
            self._tried_with = present
        return self._products

    @property
    def _has_foreign_step(self) -> bool:
        """Whether the activation has hooks or is another's, which must run."""
        act = self.wrapped._modules.get("act_fn")
        return act is not None and foreign_part(act) is not None

    @torch.no_grad()
    def _tried_products(self) -> ExpertProducts | None:
        """The arguments for the kernels if these give what the wrapped module's own steps give."""
        products = None
        has_norm = getattr(self.wrapped, "has_post_expert_norm", False)
        if all(self.parts.values()) and not has_norm and not self._has_foreign_step:
            products = ExpertProducts.of(self.wrapped, *(self._parts(leaf) for leaf in self.projections))
        if products is None:
            _logger.info("%s: experts of another form than the kernels'; they are computed one by one", self.path)
            return None
        generator = torch.Generator().manual_seed(0)
        columns, k = self.shapes[self.projections[0]][2], min(_TRIED_EXPERTS, self.wrapped.num_experts)
        x = torch.randn(_TRIED_ROWS, columns, generator=generator)
        chosen = torch.stack([torch.randperm(self.wrapped.num_experts, generator=generator)[:k] for _ in x])
        shares = torch.rand(chosen.shape, generator=generator)
        expected = self._run_by_run(x, chosen, shares)
        difference = float((products.output(x, chosen, shares) - expected).norm() / expected.norm())
        if difference <= _TOLERANCE:
            return products
        _logger.warning(
            "%s: the kernels for experts differ from the module by a relative %.2g; they are not used", self.path,
            difference,
        )  # fmt: skip
        return None

    def most_rows_of_codes(self, dtype: torch.dtype) -> int:
        """The most rows of an expert that are multiplied with codes."""
        return min(most_rows_of_codes(weights.name, dtype) for weights in self.packed_weights())

    def _in_parts(
        self, products: ExpertProducts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor,
        counts: torch.Tensor, most: int,
    ) -> torch.Tensor:  # fmt: skip
        """As `computed`, for a prompt: experts of up to `most` rows by codes, some at a time, others by numbers."""
        beyond = self.wrapped.num_experts
        few = chosen.where((counts <= most)[chosen.clamp(max=beyond - 1)], beyond)
        many = chosen.where(few == beyond, beyond)
        out = self._run_by_run(x, many, shares).float()
        part = (counts.where(counts <= most, 0).cumsum(0) - 1).clamp(min=0) // _PAIRS_AT_ONCE
        for number in part.unique().tolist():
            (experts,) = (part == number).nonzero(as_tuple=True)
            first, last = experts[0], experts[-1]
            own = few.where((few >= first) & (few <= last), beyond)
            (rows,) = (own < beyond).any(dim=1).nonzero(as_tuple=True)
            if len(rows):
                out.index_add_(0, rows, products.output(x[rows], own[rows], shares[rows]))
        return out.to(x.dtype)

    def _run_by_run(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """As `computed`, by the wrapped module's own steps between the projections."""
        ids, order = chosen.reshape(-1).sort(stable=True)
        tokens, shares = order // chosen.shape[1], shares.reshape(-1)[order].float()
        runs = _runs(ids.tolist(), self.wrapped.num_experts)
        few = all(end - first <= FEW_ROWS for first, end, _ in runs)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for batch in [runs] if few and runs else [[run] for run in runs]:
            first, end = batch[0][0], batch[-1][1]
            rows = tokens[first:end]
            # Few rows are computed in float32, and stay in it between the two products.
            numbers = x[rows].float() if few else x[rows]
            result = self._through(numbers, [(a - first, b - first, expert) for a, b, expert in batch])
            out.index_add_(0, rows, result.float() * shares[first:end, None])
        return out.to(x.dtype)

    def _decoded(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """As `computed`, for few tokens on a GPU: the host does not read which experts are chosen."""
        counted = shares.float().where(chosen < self.wrapped.num_experts, 0.0)
        rows = x.float().repeat_interleave(chosen.shape[1], dim=0)
        result = self._through(rows, chosen.reshape(-1).long())
        return (result.unflatten(0, chosen.shape) * counted[..., None]).sum(dim=1).to(x.dtype)

    def _through(self, x: torch.Tensor, where: Sequence[tuple[int, int, int]] | torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] through the experts of its runs, or of its rows: [rows, hidden]."""
        inner = self._project(self.projections[0], x, where)
        inner = self.wrapped._apply_gate(inner) if self.wrapped.has_gate else self.wrapped.act_fn(inner)
        result = self._project(self.projections[1], inner, where)
        return self.wrapped.post_expert_norm(result) if getattr(self, "has_post_expert_norm", False) else result

    def _project(
        self, leaf: str, x: torch.Tensor, where: Sequence[tuple[int, int, int]] | torch.Tensor
    ) -> torch.Tensor:
        parts = self._parts(leaf)
        weights = [weights for _, weights in parts]
        if isinstance(where, torch.Tensor):
            results = multiply_experts_of_rows(x, weights, where)
        else:
            results = multiply_experts(x, weights, where)
        y = results[0]
        if len(results) > 1:
            y = torch.empty((len(x), self.shapes[leaf][1]), dtype=x.dtype, device=x.device)
            for (outputs, _), result in zip(parts, results, strict=True):
                y[:, outputs] = result
        if self.wrapped.has_bias:
            y = y + _of_rows(getattr(self.wrapped, f"{leaf}_bias"), where).to(y.dtype)
        return y

    def _in_numbers(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The output of the wrapped module's own forward, for unpacked weights."""
        for leaf in self.projections:
            if self.parts[leaf]:
                _logger.warning("%s: one projection is kept unquantized, so %s is too", self.path, leaf)
                self._give(leaf, self._unpacked(leaf))
                self._forget(leaf)
        dtype = getattr(self.wrapped, self.projections[0]).dtype
        return self.own_forward(x.to(dtype), chosen, shares.to(dtype)).to(x.dtype)

    def _keep(self, leaf: str, outputs: slice, weights: ExpertWeights) -> None:
        self.register_buffer(f"{leaf}_packed_{len(self.parts[leaf])}", weights.data, persistent=False)
        self.parts[leaf].append((outputs, weights))
        rows = self.shapes[leaf][1]
        if sum(len(range(rows)[outputs]) for outputs, _ in self.parts[leaf]) == rows:
            self._give(leaf, self._nothing(leaf))

    def _parts(self, leaf: str) -> list[tuple[slice, ExpertWeights]]:
        """A projection's parts on the present device of their bytes."""
        parts = self.parts[leaf]
        for number, (outputs, weights) in enumerate(parts):
            parts[number] = outputs, weights.at(getattr(self, f"{leaf}_packed_{number}"))
        return parts

    def _nothing(self, leaf: str) -> torch.Tensor:
        """An empty tensor with the device and dtype of a projection's weights, in their place while they are packed."""
        return torch.empty(0, dtype=self.dtype, device=self.parts[leaf][0][1].data.device)

    def _forget(self, leaf: str) -> None:
        for number in range(len(self.parts[leaf])):
            delattr(self, f"{leaf}_packed_{number}")
        self.parts[leaf] = []

    def _unpacked(self, leaf: str) -> torch.Tensor:
        """A projection's weights, unpacked, in the wrapped module's layout."""
        experts, rows, columns = self.shapes[leaf]
        shape = (experts, columns, rows) if self.wrapped.is_transposed else (experts, rows, columns)
        parts = self._parts(leaf)
        numbers = torch.empty(shape, dtype=self.dtype, device=parts[0][1].data.device)
        for outputs, weights in parts:
            for room, expert in zip(self._by_output(numbers), weights.experts, strict=True):
                room[outputs] = expert.unpacked(self.dtype)
        return numbers

    def _by_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in a projection's layout, as [experts, outputs, inputs]."""
        return tensor.transpose(1, 2) if self.wrapped.is_transposed else tensor

    def _give(self, leaf: str, numbers: torch.Tensor) -> None:
        setattr(self.wrapped, leaf, nn.Parameter(numbers, requires_grad=False))


def _runs(ids: list[int], experts: int) -> list[tuple[int, int, int]]:
    """(first, end, expert) of each run of equal ids; ids are sorted, and those beyond the experts are omitted."""
    runs, first = [], 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ids[place] != ids[first]:
            if ids[first] < experts:
                runs.append((first, place, ids[first]))
            first = place
    return runs


def _of_rows(biases: torch.Tensor, where: Sequence[tuple[int, int, int]] | torch.Tensor) -> torch.Tensor:
    """The bias of each row's expert, [rows, outputs], from biases [experts, outputs]."""
    if isinstance(where, torch.Tensor):
        return biases[where.clamp(max=len(biases) - 1)]
    return torch.cat([biases[expert].expand(end - first, -1) for first, end, expert in where])
