"""Where `attend_on: auto` has a decoded token attend to the Context of a model on a GPU: there, or on the CPU.

With `split` both attend, and what the slots lack is divided by the rates that `auto` decides by.

A GPU that attends has the index and slots for what is chosen, and reads over the bus what the slots lack; the CPU reads
all that is chosen, and what it is chosen by, where it lies in DRAM.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.footprint import TokenReads
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.gpu_ops.attention_backend import AttentionBackend, attending_by, takes_token
from hetero_kv.gpu_ops.mapped_memory import are_the_hosts
from hetero_kv.planning.common_plan import CommonPlan
from hetero_kv.planning.footprint import Footprint
from hetero_kv.planning.plan import Plan
from hetero_kv.planning.planned import Planned
from hetero_kv.planning.read_rates import ReadRates, read_rates
from hetero_kv.settings.engine_settings import AUTO, CPU, GPU, SPLIT

_logger = logging.getLogger(__name__)
#: The assumed share of chosen keys and values that no token before has brought to the slots. Measured behind 6,000
#: tokens of this project's documentation with Qwen2.5-Coder-0.5B: under `quest` the token before had not chosen 15 % of
#: a kv head's 1,009 tokens; under `adaptive` it had not chosen 31 % of 271, and no token before had chosen 9 %, which
#: are not in its slots. ShadowKV reports 40 % of its chunks (arXiv:2410.21465).
MISSED = 0.15
_OPEN = f"{GPU} or {CPU}"
# The kernel that reads rows reads numbers of four bytes.
_WORD = 4


class Decision(NamedTuple):
    """A place, `gpu`, `split` or `cpu`, and why; before a model is loaded it may be open.

    Attributes:
        bus_share: of what slots lack, the share that comes over the bus before the GPU attends, with `split`.
    """

    place: str
    reason: str
    bus_share: float = 0.0

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class AttentionPlace:
    """Where a model's tokens attend to the Context, if the setting `attend_on` leaves that, or the shares, open.

    It is decided for the device on which the model computes when its first cache is made, and again only if the model
    has moved to another one since.

    Args:
        setting: the setting `attend_on`.

    Attributes:
        setting: it.
        decision: None before the first cache, and where the setting is `gpu` or `cpu`.
    """

    def __init__(self, setting: str = CPU) -> None:
        self.setting = setting
        self._device: torch.device | None = None
        self._lock = threading.RLock()
        self.decision: Decision | None = None

    def decide(
        self, injection: Planned, operators: Sequence[AttentionOperator], sequences: int, length: int | str
    ) -> Decision | None:
        """The decision, which `operators` follow; None where there is nothing to decide, or no weights yet.

        Args:
            injection: the model with its rules; asked for its operators, it calls this again.
            operators: those of attention.
            sequences: how many decode together.
            length: tokens of the longest, which must fit on a GPU that attends; `auto` for the model's context length.
        """
        device: torch.device = next(injection.model.parameters()).device
        if self.setting not in (AUTO, SPLIT) or device.type == "meta":
            return None
        with self._lock:
            if device != self._device:
                before, self._device = self._device, device
                try:
                    tokens = _tokens(injection, length)
                    if self.setting == SPLIT:
                        self.decision = _divided(injection, device, tokens)
                    else:
                        self.decision = _decided(injection, operators, device, sequences, tokens)
                except BaseException:
                    self._device = before
                    raise
                for each in operators:
                    each.attend_on(self.decision.place)
                    each.divide_missing(self.decision.bus_share)
                _logger.info("attend_on: %s is %s", self.setting, self.decision)
            return self.decision


def planned(injection: Planned, operators: Sequence[AttentionOperator], plan: Callable[[], Plan]) -> Decision | None:
    """What `attend_on: auto` gives, as far as it is known before a model on the meta device is loaded; None: it is set.

    `operators` follow: on the GPU where measured rates decide, which takes more of its memory.

    plan: a plan of the model on a GPU.
    """
    if injection.engine.attend_on != AUTO:
        return None
    if (reason := _refusal(injection, operators)) is not None:
        return Decision(CPU, reason)
    if (reason := _lacking(operators, plan, _tokens(injection, injection.engine.max_seq_len))) is not None:
        return Decision(CPU, reason)
    return Decision(_OPEN, "read rates that the first context measures decide; planned as if the GPU attended")


def faster(reads: TokenReads, rates: ReadRates) -> Decision:
    """Where a token's attention waits less: for the CPU's reading, or for the bus.

    Equal waits count for the GPU, whose layers do not wait for the host besides.

    Args:
        reads: of all layers.
        rates: of this machine.
    """
    missed = MISSED * reads.chosen
    over_bus, by_cpu = missed / rates.bus, reads.by_cpu / rates.cpu
    reason = (
        f"a token reads at most {reads.by_cpu / 1e6:,.1f} MB on the CPU at {rates.cpu / 1e9:.3g} GB/s "
        f"({1e3 * by_cpu:.3g} ms), or {missed / 1e6:,.1f} MB over the bus at {rates.bus / 1e9:.3g} GB/s "
        f"({1e3 * over_bus:.3g} ms), if {MISSED:.0%} of what is chosen were not chosen before"
    )
    return Decision(GPU if over_bus <= by_cpu else CPU, reason)


def divided(rates: ReadRates) -> Decision:
    """How `attend_on: split` divides what slots lack, so that the bus and the CPU take equally long."""
    share = rates.bus / (rates.bus + rates.cpu)
    reason = (
        f"of the chosen blocks that the GPU lacks the bus brings {share:.0%} at {rates.bus / 1e9:.3g} GB/s, while the "
        f"CPU attends to the others at {rates.cpu / 1e9:.3g} GB/s"
    )
    return Decision(SPLIT, reason, share)


def _divided(injection: Planned, device: torch.device, tokens: int) -> Decision:
    if device.type != "cuda" or not (reads := _reads(injection, tokens)).chosen:
        # A decoded token refuses the CPU by name.
        return Decision(SPLIT, "no block is missing on a GPU")
    try:
        rates = _rates(device, reads)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Decision(SPLIT, f"the CPU attends to all that the GPU lacks, for {_no_memory(error)}")
    # Without rates DRAM cannot be page-locked, which a decoded token refuses by name.
    return Decision(SPLIT, "CUDA does not page-lock DRAM") if rates is None else divided(rates)


def _rates(device: torch.device, reads: TokenReads) -> ReadRates | None:
    row = -(-max(reads.row, 1) // _WORD) * _WORD
    return read_rates(device, row, torch.get_num_threads())


def _no_memory(error: BaseException) -> str:
    return f"there is no memory to measure read rates with ({type(error).__name__})"


def _decided(
    injection: Planned, operators: Sequence[AttentionOperator], device: torch.device, sequences: int, tokens: int
) -> Decision:
    if device.type != "cuda":
        return Decision(CPU, "the model computes on the CPU")
    reason = _refusal(injection, operators) or _obstacle_of(device, injection, operators)
    if reason is None:
        reason = _lacking(operators, partial(_plan, injection, sequences), tokens)
    if reason is not None:
        return Decision(CPU, reason)
    reads = _reads(injection, tokens)
    if not reads.chosen:
        return Decision(GPU, "it has all keys and values that a token attends to")
    try:
        rates = _rates(device, reads)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Decision(CPU, _no_memory(error))
    return Decision(CPU, "CUDA does not page-lock DRAM") if rates is None else faster(reads, rates)


def _plan(injection: Planned, sequences: int) -> Plan:
    return Plan.of(injection) if sequences == 1 else CommonPlan.of(injection, sequences)


def _tokens(injection: Planned, length: int | str) -> int:
    return length if isinstance(length, int) else injection.context_length


def _refusal(injection: Planned, operators: Sequence[AttentionOperator]) -> str | None:
    """Why these rules refuse `attend_on: gpu`; None if they do not."""
    if injection.engine.index_device == CPU:
        return "index_device is cpu, and a GPU that attends also chooses"
    for each in operators:
        if (obstacle := each.gpu_obstacle) is not None:
            return f"{each.path}: {obstacle}"
    if not any(each.reads_attend_on for each in operators):
        return "the rules inject no RetrievalAttention or TokenRetrievalAttention, which alone attend on a GPU"
    return None


def _obstacle_of(device: torch.device, injection: Planned, operators: Sequence[AttentionOperator]) -> str | None:
    """Why this device cannot attend; None if it can."""
    config = attention_module.text_config(injection.model)
    with attending_by(AttentionBackend(injection.engine.attention_backend)):
        for each in operators:
            shape = KVShape.of_attention(each.wrapped, config)
            keys, values = (
                torch.empty(1, 1, 1, dim, dtype=injection.model.dtype, device=device)
                for dim in (shape.k_dim, shape.v_dim)
            )
            if each.reads_attend_on and not takes_token(keys, keys, values):
                return "Triton's kernels do not run there for this model, or attention_backend names others"
    if not are_the_hosts(device):
        return "this GPU reads page-locked memory at other addresses than the CPU"
    return None


def _lacking(operators: Sequence[AttentionOperator], plan: Callable[[], Plan], tokens: int) -> str | None:
    """Why a context does not fit if the GPU attends, as which `operators` count then; None if it does, or may."""
    for each in operators:
        each.attend_on(GPU)
    by_gpu = plan()
    if by_gpu.fits_gpu(tokens):
        return None
    for each in operators:
        each.attend_on(CPU)
    return (
        f"with the index and chosen blocks on the GPU {by_gpu.contents(tokens)} take "
        f"{by_gpu.gpu_needed(tokens) / 1e9:.2f} GB of its memory, and {(by_gpu.gpu or 0) / 1e9:.2f} GB are free"
    )


def _reads(injection: Planned, tokens: int) -> TokenReads:
    """What a token reads in all layers, of a sequence of `tokens`."""
    found = TokenReads()
    for layer in Footprint.of(injection).layers:
        found = found.plus(layer.token_reads(tokens))
    return found
