"""The second half of a decoder layer, for decoded tokens: residual, norm, MLP or mixture, in one kernel.

A layer may have a mixer alone, whose output is added, or an MLP or a mixture alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from hetero_kv.adapter.decoder_form import DecoderForm, applied_factors, applied_norm, floats_of
from hetero_kv.adapter.mixture_form import MixtureForm
from hetero_kv.adapter.packed_mlp import PackedMLP
from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.fused_decode_layer import attention_output, gate_region, mixer_output
from hetero_kv.cpu_ops.fused_mixture import mixture_output
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.quantized_linear import multiply_region
from hetero_kv.cpu_ops.routing import router_region
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.cpu_ops.weight_dots import rows_per_pass
from hetero_kv.cpu_ops.weight_formats import TILE
from hetero_kv.weights.kernel_arrays import NAMES
from hetero_kv.weights.quantized_weight import most_rows_of_codes

_NO_MATRIX = (0,) * 5


class FeedForward(ABC):
    """The second half of a decoder layer.

    Attributes:
        most_rows: the largest number of tokens that it takes.
        by_tiles: whether it takes more tokens behind these, which AMX tiles multiply.
        copied: tensors of which it has copies.
        trials: the largest number of random inputs that it is tested with; the best result counts.
    """

    trials = 1
    by_tiles = False
    copied: tuple[torch.Tensor, ...] = ()

    def __init__(self, form: DecoderForm, most_rows: int) -> None:
        self.most_rows = most_rows
        # A block of an MLP alone has no projection of a mixer.
        output = form.projections[-1] if form.projections else None
        self._matrix = np.array([_NO_MATRIX if output is None else output.quantized.kernels], dtype=np.int64)
        self._before = floats_of(None if output is None else output.bias), applied_factors(form.after_norm)
        self._norm, self._epsilon = applied_norm(form.mlp_norm)
        self._after = applied_factors(form.after_mlp_norm)
        self._factor, self._mlp_factor = np.float32(form.factor), np.float32(form.mlp_factor)
        self._addresses, self._per_pass = (all_threads(), multiply_region()), rows_per_pass()

    @property
    def is_current(self) -> bool:
        """Whether the tensors that it reads in place have not moved."""
        return True

    @abstractmethod
    def __call__(
        self, queue: KernelQueue, hidden: np.ndarray, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray, few: int
    ) -> None:
        """Queue the kernel that writes the layer's output to `out`.

        It computes that from the layer's input and from what the mixer gives before its output projection.

        hidden, out: [rows, width], mixed: [rows, columns], float32 or the bits of bfloat16; without columns for a block
        of an MLP alone. gates: [rows, columns] float32, what `mixed` is multiplied with, or empty. few: how many of the
        first rows are multiplied by codes; all, unless `by_tiles`.
        """


class _MixerAlone(FeedForward):
    """The output projection of a mixer, and no MLP."""

    def __init__(self, form: DecoderForm) -> None:
        super().__init__(form, most_rows_of_codes(form.projections[-1].quantized.name, form.dtype))

    def __call__(
        self, queue: KernelQueue, hidden: np.ndarray, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray, few: int
    ) -> None:
        queue.add(
            mixer_output(NAMES[hidden.dtype]), *self._addresses, hidden, mixed, gates, *self._before, self._epsilon,
            self._factor, self._matrix, out, self._per_pass, at_most(torch.get_num_threads()),
        )  # fmt: skip


class _PackedFeedForward(FeedForward):
    """An MLP of quantized matrices without biases."""

    def __init__(self, form: DecoderForm, mlp: PackedMLP) -> None:
        dtype = form.dtype
        super().__init__(form, min(most_rows_of_codes(name, dtype) for name in mlp.formats))
        self._matrices = np.concatenate([self._matrix, mlp.calls])
        self._gate_up = gate_region(mlp.kind)
        self._gate_factor = np.float32(mlp.gate_factor)
        self._mlp_factor *= np.float32(mlp.factor)
        self.by_tiles = mlp.has_gate and bool(form.projections) and dtype is torch.bfloat16 and multiplies_by_tiles()

    def __call__(
        self, queue: KernelQueue, hidden: np.ndarray, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray, few: int
    ) -> None:
        queue.add(
            attention_output(NAMES[hidden.dtype]), *self._addresses, self._gate_up, hidden, mixed, gates, *self._before,
            self._norm, self._after, self._epsilon, self._factor, self._gate_factor, self._mlp_factor, self._matrices,
            out, few, self._per_pass, at_most(torch.get_num_threads()),
        )  # fmt: skip


class _MixtureFeedForward(FeedForward):
    """A mixture of experts."""

    # If two experts are nearly tied, rounding decides between them.
    trials = 3

    def __init__(self, form: DecoderForm, mixture: MixtureForm) -> None:
        super().__init__(form, mixture.experts.routed.most_rows_of_codes(form.dtype))
        self._mixture = mixture
        self.copied = mixture.copied
        self._router = router_region(NAMES[mixture.router.dtype])

    @property
    def is_current(self) -> bool:
        return self._mixture.is_current

    def __call__(
        self, queue: KernelQueue, hidden: np.ndarray, mixed: np.ndarray, gates: np.ndarray, out: np.ndarray, few: int
    ) -> None:
        own, products = self._mixture, self._mixture.products
        kernel = mixture_output(NAMES[hidden.dtype], NAMES[own.router.dtype], products.dtype)
        queue.add(
            kernel, *self._addresses, self._router, products.regions, hidden, mixed, gates, self._matrix, *self._before,
            self._norm, self._after, self._epsilon, self._factor, self._mlp_factor, own.router, own.router_bias,
            own.correction, own.choice, own.scale, own.k, products.matrices, *products.biases, own.shared,
            own.shared_gate, products.sharpness, products.limit, out, self._per_pass, at_most(torch.get_num_threads()),
        )  # fmt: skip


def feed_forward_of(form: DecoderForm) -> FeedForward | None:
    """The second half of a layer; None for another form."""
    if form.mlp is None:
        return _MixerAlone(form)
    if hasattr(form.mlp, "experts"):
        mixture = MixtureForm.of(form.mlp, form.shared)
        return None if mixture is None else _MixtureFeedForward(form, mixture)
    mlp = PackedMLP.of(form.mlp) if form.shared is None else None
    return None if mlp is None or mlp.inner % TILE else _PackedFeedForward(form, mlp)
