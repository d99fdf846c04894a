"""How long a context can be: what it takes against what is free, with a reserve.

One function serves `hetero-kv plan`, `max_seq_len: auto`, and the refusal of a `max_seq_len` that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_kv.engine.held import NOTHING_HELD, Held
from hetero_kv.engine.reservations import NOTHING_RESERVED, Reserved
from hetero_kv.errors import OutOfMemoryError
from hetero_kv.planning.footprint import PASSING, Footprint, Memory
from hetero_kv.planning.free_memory import free_dram, free_gpu, limits_addresses
from hetero_kv.planning.planned import Planned

__all__ = [
    "RESERVE",
    "Footprint",
    "Memory",
    "OutOfMemoryError",
    "Plan",
    "beyond_training",
    "free_dram",
    "free_gpu",
    "resolve_max_seq_len",
]

#: Share of the memory that is free beside the weights that is left to everything else.
RESERVE = 0.1

#: No context is longer: what `Plan.largest` is where memory does not grow with the context (windows, bounded layers).
LONGEST = (1 << 40) - 1


@dataclass(frozen=True)
class Plan:
    """A model's footprint against the memory that is free.

    Attributes:
        footprint: what a context takes.
        dram: free DRAM, bytes, what other caches are to have of it included.
        gpu: free memory of the GPU, bytes; None where the model computes on the CPU, or nothing is known of the GPU.
        context_length: what the model was made for, tokens.
        batch: sequences that are processed together.
        forks: of the cache, each with room for a context of its own.
        held: what is there of the first sequences already.
        reserved: what other caches of this process are to have.
    """

    footprint: Footprint
    dram: int
    gpu: int | None
    context_length: int
    batch: int = 1
    forks: int = 0
    held: Held = NOTHING_HELD
    reserved: Reserved = NOTHING_RESERVED

    @classmethod
    def of(
        cls,
        injection: Planned,
        batch: int = 1,
        forks: int = 0,
        held: Held = NOTHING_HELD,
        reserved: Reserved = NOTHING_RESERVED,
    ) -> Plan:
        """For a loaded model with its rules, by the memory that is free now."""
        footprint = Footprint.of(injection)
        device = str(next(injection.model.parameters()).device)
        gpu = free_gpu(device) if device.startswith("cuda") else None
        if (held.mapped or reserved.mapped) and limits_addresses():
            # There a mapped page counts as any other does.
            held = Held(held.tokens)
            reserved = reserved._replace(size=reserved.size - reserved.mapped)
        return cls(footprint, free_dram(), gpu, injection.context_length, batch, forks, held, reserved)

    def memory(self, tokens: int) -> Memory:
        """What contexts of `tokens` take, term by term."""
        return self.footprint.memory(tokens, self.batch, self.forks, self.held.tokens)

    def dram_needed(self, tokens: int) -> int:
        """DRAM that a context of `tokens` takes, bytes; without a GPU the model computes there too.

        Beside pages of files, which the system lets go of where memory is short.
        """
        memory = self.memory(tokens)
        # Caches that wait for a share are to get as much.
        store = max(0, memory.store - self.held.mapped) * (1 + self.reserved.waiting)
        return store if self.footprint.on_gpu else store + memory.compute

    def kept_in_dram(self, tokens: int) -> int:
        """DRAM that contexts of `tokens` keep when no prompt is under way, bytes."""
        memory, on_gpu = self.memory(tokens), self.footprint.on_gpu
        sizes = memory.sizes.items()
        kept = sum(size for term, size in sizes if term not in PASSING and (term.in_dram or not on_gpu))
        return max(0, kept - self.held.mapped)

    def is_crowded(self, wanted: int | str) -> bool:
        """Whether there would be room for `wanted` tokens if there were no other caches."""
        if self.reserved == NOTHING_RESERVED:
            return False
        return not (self if wanted == "auto" else self._alone()).fits(
            self.context_length if wanted == "auto" else int(wanted)
        )

    def _alone(self) -> Plan:
        """The plan without those that wait for a share of what is free."""
        return replace(self, reserved=self.reserved._replace(waiting=0))

    def gpu_needed(self, tokens: int) -> int:
        """Memory of the GPU that a context of `tokens` takes, bytes; 0 without a GPU."""
        return self.memory(tokens).compute if self.footprint.on_gpu else 0

    def fits_dram(self, tokens: int) -> bool:
        """Whether a context of `tokens` leaves the reserve of DRAM free."""
        weights = self.footprint.weights_in_dram if self.footprint.on_gpu else self.footprint.weights
        return self._leaves_reserve(self.dram_needed(tokens) + self.reserved.size, self.dram, weights)

    def fits_gpu(self, tokens: int) -> bool:
        """Whether it leaves the reserve of the GPU's memory free; True where there is none, or nothing is known."""
        weights = self.footprint.weights if self.footprint.on_gpu else 0
        return self.gpu is None or self._leaves_reserve(self.gpu_needed(tokens), self.gpu, weights)

    def _leaves_reserve(self, needed: int, free: int, weights: int) -> bool:
        """Whether the reserve stays of what is free beside weights that are still to be loaded.

        So that a model is planned as it will be accepted when it is loaded: then its weights are no longer free.
        """
        return needed - weights <= (free - weights) * (1 - RESERVE)

    def fits(self, tokens: int) -> bool:
        """Whether a context of `tokens` fits everywhere."""
        return self.fits_dram(tokens) and self.fits_gpu(tokens)

    def largest(self) -> int:
        """The most tokens that fit, whatever the model was made for; 0 when nothing does."""
        fitting, beyond = 0, 1
        while beyond <= LONGEST and self.fits(beyond):
            fitting, beyond = beyond, 2 * beyond
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            fitting, beyond = (middle, beyond) if self.fits(middle) else (fitting, middle)
        return fitting


def beyond_training(tokens: int, context_length: int) -> str | None:
    """What is to be said of a context of `tokens` where the model was made for fewer; None where it was not."""
    if tokens <= context_length:
        return None
    return (
        f"{tokens:,} tokens are more than the {context_length:,} that the model was made for: beyond these its answers "
        "get worse, or senseless"
    )


def resolve_max_seq_len(wanted: int | str, plan: Plan) -> int:
    """The capacity in tokens that `max_seq_len` stands for.

    Args:
        wanted: tokens, or "auto": the model's context length, or what fits if that is less, in an equal share of what
            is free where other caches with "auto" have no tokens yet.

    Raises OutOfMemoryError when it does not fit; the message says how many tokens would.
    """
    if wanted == "auto" and (share := plan.largest()):
        return min(plan.context_length, share)
    plan = plan._alone()
    if wanted != "auto" and plan.fits(int(wanted)):
        return int(wanted)
    largest = plan.largest()
    if wanted == "auto" and largest:
        return min(plan.context_length, largest)
    tokens = 1 if wanted == "auto" else int(wanted)
    remedies = [f"max_seq_len {largest}"] if largest else []
    batches = [(replace(plan, batch=n), f"a batch of {n}") for n in range(1, plan.batch)]
    forks = [(replace(plan, forks=n), f"{n} forks") for n in range(plan.forks)]
    for smaller in (batches, forks):
        remedies += [text for fewer, text in smaller if fewer.fits(tokens)][-1:]
    nothing = "not even one token fits: " + (
        "reset or drop others, or give each a max_seq_len" if plan.reserved.caches else "take a smaller model"
    )
    remedy = f"{', or '.join(remedies)} would fit" if remedies else nothing
    raise OutOfMemoryError(f"max_seq_len is {wanted}: {_lacking(plan, tokens)}; {remedy}")


def _lacking(plan: Plan, tokens: int) -> str:
    """What a context takes and what is free, of DRAM or of the GPU's memory, whichever is short."""
    needed, free, of = plan.dram_needed(tokens), max(0, plan.dram - plan.reserved.size), "DRAM"
    if plan.fits_dram(tokens) and plan.gpu is not None:
        needed, free, of = plan.gpu_needed(tokens), plan.gpu, "the GPU's memory"
    sequences = plan.batch * (1 + plan.forks)
    what = f"{tokens} tokens" if sequences == 1 else f"{sequences} sequences of {tokens} tokens"
    others = plan.reserved
    taken = ""
    if others.caches and of == "DRAM":
        taken = f"beside {others.size / 1e9:.2f} GB that {others.caches} other caches of this process are to have "
    return (
        f"{what} take {needed / 1e9:.2f} GB of {of}, and {free / 1e9:.2f} GB are free "
        f"{taken}({RESERVE:.0%} of what is free beside the weights is kept in reserve)"
    )
