"""Computes the longest context that fits: its footprint against free memory, less a reserve.

The same plan serves `hetero-kv plan`, `max_seq_len: auto`, and the refusal of a `max_seq_len` that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from hetero_kv.engine.reservations import NOTHING_RESERVED, Reserved
from hetero_kv.engine.resident_prefix import NO_RESIDENT_PREFIX, ResidentPrefix
from hetero_kv.errors import OutOfMemoryError
from hetero_kv.planning.footprint import TRANSIENT, Footprint, MemoryUse
from hetero_kv.planning.free_memory import free_dram, free_gpu, limits_addresses
from hetero_kv.planning.planned import Planned
from hetero_kv.planning.weights import experts_in_dram

__all__ = [
    "RESERVE",
    "Footprint",
    "MemoryUse",
    "OutOfMemoryError",
    "Plan",
    "beyond_training",
    "free_dram",
    "free_gpu",
    "resolve_max_seq_len",
]

#: Share of the free memory, less the weights, that a plan leaves unused.
RESERVE = 0.1

# The most of the free memory that is left to weights that are mapped from the disk.
_SHARE_OF_MAPPED_WEIGHTS = 0.5

#: The longest context: the result of `Plan.largest` where memory does not grow with length (windows, bounded layers).
LONGEST = (1 << 40) - 1


@dataclass(frozen=True)
class Plan:
    """A model's footprint against the free memory.

    Attributes:
        footprint: the footprint of a context.
        dram: free DRAM, bytes, including what other caches of this process have reserved.
        gpu: free memory of the GPU, bytes; None if the model computes on the CPU, or if it is unknown.
        context_length: the length that the model was trained for, tokens.
        batch: sequences that are processed together.
        forks: forks of the cache, each with the capacity of a whole context.
        resident: the resident prefix of the first sequences.
        reserved: the reservations of other caches of this process.
        budget: the most DRAM that all caches of this process may keep together (`dram_budget_gb`), bytes; None: all
            that is free.
    """

    footprint: Footprint
    dram: int
    gpu: int | None
    context_length: int
    batch: int = 1
    forks: int = 0
    resident: ResidentPrefix = NO_RESIDENT_PREFIX
    reserved: Reserved = NOTHING_RESERVED
    budget: int | None = None

    @classmethod
    def of(
        cls,
        injection: Planned,
        batch: int = 1,
        forks: int = 0,
        resident: ResidentPrefix = NO_RESIDENT_PREFIX,
        reserved: Reserved = NOTHING_RESERVED,
    ) -> Self:
        """The plan of a loaded model with its rules, by the memory that is free now."""
        footprint = Footprint.of(injection)
        device = str(next(injection.model.parameters()).device)
        gpu = free_gpu(device) if device.startswith("cuda") else None
        if (resident.mapped or reserved.mapped) and limits_addresses():
            # Under an address-space limit a mapped page counts like any other.
            resident = ResidentPrefix(resident.tokens)
            reserved = reserved._replace(size=reserved.size - reserved.mapped)
        # A budget is for the whole process, whichever model's rules name it.
        budgets = (injection.engine.dram_budget, reserved.budget)
        budget = min((each for each in budgets if each is not None), default=None)
        free = free_dram()
        mapped = getattr(injection.model, "hetero_kv_mapped_weights", 0)
        if gpu is not None:
            mapped = min(mapped, experts_in_dram(injection.model, torch.device(device)))
        # The system counts their pages as free.
        free -= min(mapped, round(_SHARE_OF_MAPPED_WEIGHTS * free))
        return cls(footprint, free, gpu, injection.context_length, batch, forks, resident, reserved, budget)

    def share(self, part: float) -> Self:
        """The plan of caches that take at most this part of what is free, because others follow that need the rest."""
        if part == 1:
            return self
        dram = self.reserved.size + round(part * max(0, self.dram - self.reserved.size))
        budget = self.budget
        if budget is not None:
            budget = self.reserved.planned + round(part * max(0, budget - self.reserved.planned))
        return replace(self, dram=dram, budget=budget)

    def memory(self, tokens: int) -> MemoryUse:
        """The memory of contexts of `tokens`, term by term."""
        return self.footprint.memory(tokens, self.batch, self.forks, self.resident.tokens)

    def contents(self, tokens: int) -> str:
        """Describes contexts of `tokens`, for errors."""
        sequences = self.batch * (1 + self.forks)
        return f"{tokens} tokens" if sequences == 1 else f"{sequences} sequences of {tokens} tokens"

    def dram_needed(self, tokens: int) -> int:
        """DRAM that a context of `tokens` takes, bytes; without a GPU that includes the model's computation.

        Mapped file pages do not count, since the system evicts them when memory is short.
        """
        memory = self.memory(tokens)
        # Each cache that waits for a share gets the same amount.
        store = max(0, memory.store - self.resident.mapped) * (1 + self.reserved.waiting)
        return store if self.footprint.on_gpu else store + memory.compute

    def resident_dram(self, tokens: int) -> int:
        """DRAM that contexts of `tokens` keep outside prefill, bytes."""
        memory, on_gpu = self.memory(tokens), self.footprint.on_gpu
        sizes = memory.sizes.items()
        kept = sum(size for term, size in sizes if term not in TRANSIENT and (term.in_dram or not on_gpu))
        return max(0, kept - self.resident.mapped)

    def is_crowded(self, requested: int | str) -> bool:
        """Whether other caches' reservations leave too little for `requested` tokens ("auto": the context length)."""
        if self.reserved.is_nothing and (self.budget is None or not self.reserved.planned):
            return False
        return not (self if requested == "auto" else self._alone()).fits(
            self.context_length if requested == "auto" else int(requested)
        )

    def _alone(self) -> Plan:
        """The plan without the caches that wait for a share of the free memory."""
        return replace(self, reserved=self.reserved._replace(waiting=0))

    def gpu_needed(self, tokens: int) -> int:
        """Memory of the GPU that a context of `tokens` takes, bytes; 0 without a GPU."""
        return self.memory(tokens).compute if self.footprint.on_gpu else 0

    def fits_budget(self, tokens: int) -> bool:
        """Whether all caches of this process, with a context of `tokens`, keep within the budget."""
        # Each cache that waits for a share gets the same amount.
        kept = self.resident_dram(tokens) * (1 + self.reserved.waiting) + self.reserved.planned
        return self.budget is None or kept <= self.budget

    def fits_dram(self, tokens: int) -> bool:
        """Whether a context of `tokens` keeps within the budget and leaves the reserve of DRAM free."""
        if not self.fits_budget(tokens):
            return False
        weights = self.footprint.weights_in_dram if self.footprint.on_gpu else self.footprint.weights
        return self._leaves_reserve(self.dram_needed(tokens) + self.reserved.size, self.dram, weights)

    def fits_gpu(self, tokens: int) -> bool:
        """Whether it leaves the reserve of the GPU's memory free; True without a GPU, or if its memory is unknown."""
        weights = self.footprint.weights if self.footprint.on_gpu else 0
        return self.gpu is None or self._leaves_reserve(self.gpu_needed(tokens), self.gpu, weights)

    def _leaves_reserve(self, needed: int, free: int, weights: int) -> bool:
        """Whether the reserve stays free; it is a share of the free memory less the weights that are yet to be loaded.

        A plan before loading thus agrees with the check after loading, when the weights' memory is no longer free.
        """
        return needed - weights <= (free - weights) * (1 - RESERVE)

    def fits(self, tokens: int) -> bool:
        """Whether a context of `tokens` fits everywhere."""
        return self.fits_dram(tokens) and self.fits_gpu(tokens)

    def largest(self) -> int:
        """The most tokens that fit, even beyond the trained length; 0 when none do."""
        fitting, beyond = 0, 1
        while beyond <= LONGEST and self.fits(beyond):
            fitting, beyond = beyond, 2 * beyond
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            fitting, beyond = (middle, beyond) if self.fits(middle) else (fitting, middle)
        return fitting


def beyond_training(tokens: int, context_length: int) -> str | None:
    """A warning for a context longer than the model was trained for; None for a shorter one."""
    if tokens <= context_length:
        return None
    return (
        f"{tokens:,} tokens exceed the {context_length:,} that the model was trained for; beyond these its answers "
        "degrade"
    )


def resolve_max_seq_len(requested: int | str, plan: Plan, setting: str = "max_seq_len") -> int:
    """The capacity in tokens for the setting `max_seq_len`.

    Args:
        requested: the setting: tokens, or "auto". "auto" is the lesser of the model's context length and what fits;
            other caches with "auto" that are still empty get an equal share of the free memory.
        setting: its name, for the error.

    Raises OutOfMemoryError when it does not fit; the message says how many tokens would.
    """
    if requested == "auto" and (share := plan.largest()):
        return min(plan.context_length, share)
    plan = plan._alone()
    if requested != "auto" and plan.fits(int(requested)):
        return int(requested)
    largest = plan.largest()
    if requested == "auto" and largest:
        return min(plan.context_length, largest)
    tokens = 1 if requested == "auto" else int(requested)
    remedies = [f"{setting} {largest}"] if largest else []
    batches = [(replace(plan, batch=n), f"a batch of {n}") for n in range(1, plan.batch)]
    forks = [(replace(plan, forks=n), f"{n} forks") for n in range(plan.forks)]
    for smaller in (batches, forks):
        remedies += [text for fewer, text in smaller if fewer.fits(tokens)][-1:]
    if not plan.fits_budget(1):
        remedy = "raise dram_budget_gb" + (", or reset or drop other caches" if plan.reserved.planned else "")
    else:
        others = plan.reserved.caches
        remedy = "reset or drop other caches, or give each a max_seq_len" if others else "take a smaller model"
    nothing = f"not even one token fits: {remedy}"
    remedy = f"{', or '.join(remedies)} would fit" if remedies else nothing
    raise OutOfMemoryError(f"{setting} is {requested}: {_lacking(plan, tokens)}; {remedy}")


def _lacking(plan: Plan, tokens: int) -> str:
    """Describes needed and free memory, of DRAM or of the GPU, whichever is short."""
    needed, free, of = plan.dram_needed(tokens), max(0, plan.dram - plan.reserved.size), "DRAM"
    if plan.fits_dram(tokens) and plan.gpu is not None:
        needed, free, of = plan.gpu_needed(tokens), plan.gpu, "the GPU's memory"
    what, others = plan.contents(tokens), plan.reserved
    if plan.budget is not None and not plan.fits_budget(tokens):
        beside = f", besides {others.planned / 1e9:.3g} GB of other caches" if others.planned else ""
        kept = plan.resident_dram(tokens) / 1e9
        return f"{what} keep {kept:.3g} GB of DRAM{beside}, and dram_budget_gb is {plan.budget / 1e9:g}"
    reserved_note = ""
    if others.caches and of == "DRAM":
        reserved_note = f"besides {others.size / 1e9:.2f} GB reserved by {others.caches} other caches of this process "
    return (
        f"{what} take {needed / 1e9:.2f} GB of {of}, and {free / 1e9:.2f} GB are free "
        f"{reserved_note}({RESERVE:.0%} of the free memory, less the weights, is kept in reserve)"
    )
