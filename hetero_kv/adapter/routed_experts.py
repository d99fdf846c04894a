"""The forward of a mixture's packed experts: each token passes through the experts that it is routed to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hetero_kv.adapter.expert_products import ExpertProducts
from hetero_kv.adapter.foreign import foreign_part
from hetero_kv.weights.expert_weights import (
    ExpertNumbers,
    ExpertWeights,
    chooses_on_device,
    multiply_experts,
    multiply_experts_of_rows,
)
from hetero_kv.weights.packed_weight import FEW_ROWS
from hetero_kv.weights.quantized_weight import most_rows_of_codes

if TYPE_CHECKING:
    from hetero_kv.adapter.quantized_experts import QuantizedExperts

_logger = logging.getLogger(__name__)
# The trial of the kernels for few rows: rows, experts of a row, and the difference of norms that rounding explains.
_TRIED_ROWS, _TRIED_EXPERTS, _TOLERANCE = 3, 4, 5e-3
# Pairs of a row and an expert whose numbers are in memory at a time.
_PAIRS_AT_ONCE = 16384
#: (first, end, expert) of rows of one expert.
Run = tuple[int, int, int]


class ExpertMatrices(Protocol):
    """Weights of experts where their products are computed: those of all experts, or of some that follow each other."""

    def matrices_of(self, leaf: str) -> Sequence[tuple[slice, ExpertWeights | ExpertNumbers]]:
        """The slices of a projection's outputs, and their weights."""

    def biases_of(self, leaf: str) -> torch.Tensor:
        """A projection's biases [experts, outputs], if the form has any."""


class RoutedExperts:
    """Computes the output of experts whose weights are packed, or that are in DRAM.

    Few rows of an expert are multiplied with its codes, all experts in one call (`ExpertProducts`), if that gives what
    the wrapped module gives. If an expert gets more rows of a prompt, its weights are unpacked, one expert at a time,
    and the wrapped module computes the step between the two projections; not where codes are faster for any rows.

    Args:
        experts: owns the weights.
    """

    def __init__(self, experts: QuantizedExperts) -> None:
        self._experts = experts
        self._products: ExpertProducts | None = None
        #: What the kernels for few rows were tried with.
        self._tried_with: list[Any] = []

    @property
    def _wrapped(self) -> Any:
        return self._experts.wrapped

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The experts' output for x, [tokens, hidden]; see `QuantizedExperts.computed`."""
        is_on_cpu = x.device.type == "cpu"
        if not is_on_cpu and chooses_on_device(x, chosen.numel(), self._experts.packed_weights()):
            return self._decoded(x, chosen, shares)
        products = self.products() if is_on_cpu else None
        if products is None:
            return self._run_by_run(x, chosen, shares)
        most = self.most_rows_of_codes(x.dtype)
        if len(x) <= most:
            return self._by_codes(products, x, chosen, shares)
        counts = chosen.flatten().bincount(minlength=self._wrapped.num_experts + 1)[: self._wrapped.num_experts]
        return self._in_parts(products, x, chosen, shares, counts, most)

    def products(self) -> ExpertProducts | None:
        """The arguments of the kernels for few rows; None if the experts' form has none, or the results differ."""
        module = self._wrapped
        settings = [getattr(module, name, None) for name in ("act_fn", "alpha", "limit", "has_bias", "training")]
        present = [
            *(weights.data.data_ptr() for weights in self._experts.packed_weights()), *settings,
            *(bias.data_ptr() for bias in module._parameters.values() if bias is not None),
            getattr(module, "_apply_gate", None), self._has_foreign_step,
        ]  # fmt: skip
        if present != self._tried_with:
            self._products = self._tried_products()
            self._tried_with = present
        return self._products

    @property
    def _has_foreign_step(self) -> bool:
        """Whether the activation is a foreign module or has hooks, which must run."""
        act = self._wrapped._modules.get("act_fn")
        return act is not None and foreign_part(act) is not None

    @property
    def _has_output_norm(self) -> bool:
        return getattr(self._wrapped, "has_post_expert_norm", False)

    @torch.no_grad()
    def _tried_products(self) -> ExpertProducts | None:
        """The arguments for the kernels if these give what the wrapped module's own steps give."""
        products, experts = None, self._experts
        if all(experts.parts.values()) and not self._has_output_norm and not self._has_foreign_step:
            products = ExpertProducts.of(
                self._wrapped, experts.form, *(experts.parts_of(leaf) for leaf in experts.projections)
            )
        if products is None:
            _logger.info("%s: experts of another form than the kernels'; they are computed one by one", experts.path)
            return None
        generator = torch.Generator().manual_seed(0)
        columns, k = experts.shapes[experts.projections[0]][2], min(_TRIED_EXPERTS, self._wrapped.num_experts)
        x = torch.randn(_TRIED_ROWS, columns, generator=generator)
        chosen = torch.stack([torch.randperm(self._wrapped.num_experts, generator=generator)[:k] for _ in x])
        shares = torch.rand(chosen.shape, generator=generator)
        expected = self._run_by_run(x, chosen, shares)
        difference = float((products.output(x, chosen, shares) - expected).norm() / expected.norm())
        if difference <= _TOLERANCE:
            return products
        _logger.warning(
            "%s: the kernels for experts differ from the module by a relative %.2g; they are not used", experts.path,
            difference,
        )  # fmt: skip
        return None

    def most_rows_of_codes(self, dtype: torch.dtype) -> int:
        """The most rows of an expert that are multiplied with codes."""
        return min(most_rows_of_codes(weights.name, dtype) for weights in self._experts.packed_weights())

    def _by_codes(
        self, products: ExpertProducts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """As `__call__`, by codes alone, some rows at a time: a row's result does not depend on the others."""
        step = max(_PAIRS_AT_ONCE // chosen.shape[1], 1)
        parts = zip(x.split(step), chosen.split(step), shares.split(step), strict=True)
        outputs = [products.output(*part) for part in parts]
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).to(x.dtype)

    def _in_parts(
        self, products: ExpertProducts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor,
        counts: torch.Tensor, most: int,
    ) -> torch.Tensor:  # fmt: skip
        """As `__call__`, for a prompt: experts of up to `most` rows by codes, some at a time, others by numbers."""
        beyond = self._wrapped.num_experts
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
        """As `__call__`, by the wrapped module's own steps between the projections."""
        ids, order = chosen.reshape(-1).sort(stable=True)
        tokens, shares = order // chosen.shape[1], shares.reshape(-1)[order].float()
        runs = runs_of(ids.tolist(), self._wrapped.num_experts)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        self.add_runs(out, x, tokens, shares, runs, self._experts)
        return out.to(x.dtype)

    def add_runs(
        self, out: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, shares: torch.Tensor, runs: Sequence[Run],
        weights: ExpertMatrices,
    ) -> None:  # fmt: skip
        """Add the experts' outputs times their shares to `out`, [tokens, hidden] float32.

        Args:
            x: [tokens, hidden].
            tokens, shares: of each pair of a token and its expert, in the order of the experts; shares are float32.
            runs: (first pair, end pair, expert's place in `weights`), in order.
        """
        few = all(end - first <= FEW_ROWS for first, end, _ in runs)
        for batch in [runs] if few and runs else [[run] for run in runs]:
            first, end = batch[0][0], batch[-1][1]
            rows = tokens[first:end]
            # Few rows are computed in float32, and stay in it between the two products.
            numbers = x[rows].float() if few else x[rows]
            result = self._through(numbers, [(a - first, b - first, expert) for a, b, expert in batch], weights)
            out.index_add_(0, rows, result.float() * shares[first:end, None])

    def _decoded(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """As `__call__`, for few tokens on a GPU: the host does not read which experts are chosen."""
        counted = shares.float().where(chosen < self._wrapped.num_experts, 0.0)
        rows = x.float().repeat_interleave(chosen.shape[1], dim=0)
        result = self._through(rows, chosen.reshape(-1).long(), self._experts)
        return (result.unflatten(0, chosen.shape) * counted[..., None]).sum(dim=1).to(x.dtype)

    def _through(self, x: torch.Tensor, where: Sequence[Run] | torch.Tensor, weights: ExpertMatrices) -> torch.Tensor:
        """x [rows, hidden] through the experts of its runs, or of its rows: [rows, hidden]."""
        inner = self._project(self._experts.projections[0], x, where, weights)
        inner = self._gated(inner) if self._experts.form.has_gate else self._wrapped.act_fn(inner)
        result = self._project(self._experts.projections[1], inner, where, weights)
        return self._wrapped.post_expert_norm(result) if self._has_output_norm else result

    def _gated(self, inner: torch.Tensor) -> torch.Tensor:
        """The step between the projections, [rows, gate and up] -> [rows, inner]."""
        own = getattr(self._wrapped, "_apply_gate", None)
        if own is not None:
            gated: torch.Tensor = own(inner)
            return gated
        # Only Llama 4's experts have it in their forward.
        gate, up = inner.chunk(2, dim=-1)
        return up * self._wrapped.act_fn(gate)

    def _project(
        self, leaf: str, x: torch.Tensor, where: Sequence[Run] | torch.Tensor, weights: ExpertMatrices
    ) -> torch.Tensor:
        parts = weights.matrices_of(leaf)
        matrices = [each for _, each in parts]
        if isinstance(where, torch.Tensor):
            packed = [each for each in matrices if isinstance(each, ExpertWeights)]
            results = multiply_experts_of_rows(x, packed, where)
        else:
            results = multiply_experts(x, matrices, where)
        y = results[0]
        if len(results) > 1:
            y = torch.empty((len(x), self._experts.shapes[leaf][1]), dtype=x.dtype, device=x.device)
            for (outputs, _), result in zip(parts, results, strict=True):
                y[:, outputs] = result
        if self._experts.form.has_bias:
            y = y + _of_rows(weights.biases_of(leaf), where).to(y.dtype)
        return y


def runs_of(ids: list[int], experts: int) -> list[Run]:
    """(first, end, expert) of each run of equal ids; ids are sorted, and those beyond the experts are omitted."""
    runs, first = [], 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ids[place] != ids[first]:
            if ids[first] < experts:
                runs.append((first, place, ids[first]))
            first = place
    return runs


def _of_rows(biases: torch.Tensor, where: Sequence[Run] | torch.Tensor) -> torch.Tensor:
    """The bias of each row's expert, [rows, outputs], from biases [experts, outputs]."""
    if isinstance(where, torch.Tensor):
        return biases[where.clamp(max=len(biases) - 1)]
    return torch.cat([biases[expert].expand(end - first, -1) for first, end, expert in where])
