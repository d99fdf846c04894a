"""The memory of one layer's keys and values, as a family reports it to the planner.

A family's operator returns its own `LayerFootprint` (`AttentionOperator.footprint`). The `shares` of a footprint are
bytes under `FootprintTerm`s, which `hetero-kv plan` prints and writes to JSON, including terms that extensions
register:

    SKETCHES = register(FootprintTerm("sketches", "sketches of the keys"))

    @dataclass(frozen=True)
    class SketchFootprint(LayerFootprint):
        def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
            yield MemoryShare(SKETCHES, demand.sequences * demand.tokens * 16)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import NamedTuple

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.errors import HeteroKVError
from hetero_kv.gpu_ops.column_sums import working_bytes


@dataclass(frozen=True)
class FootprintTerm:
    """The purpose of a part of the memory.

    Attributes:
        name: in JSON.
        meaning: one line for the plan's table.
        in_dram: whether it is always in DRAM; else it is on the compute device.
    """

    name: str
    meaning: str
    in_dram: bool = False


_TERMS: dict[str, FootprintTerm] = {}


def register(term: FootprintTerm) -> FootprintTerm:
    """Register a term under its name. Raises HeteroKVError for a name that another term has."""
    if _TERMS.setdefault(term.name, term) != term:
        raise HeteroKVError(
            f"the term {term.name!r} of a footprint is registered already, as {_TERMS[term.name].meaning!r}; give "
            f"{term.meaning!r} another name"
        )
    return term


def terms() -> tuple[FootprintTerm, ...]:
    """The registered terms, in order of registration."""
    return tuple(_TERMS.values())


KEYS_VALUES = register(FootprintTerm("keys_values", "keys and values, in blocks", in_dram=True))
REPRESENTATIVES = register(FootprintTerm("representatives", "representatives of the blocks", in_dram=True))
MEAN_KEYS = register(
    FootprintTerm("mean_keys", "mean keys of the blocks, by which sparse speculation chooses", in_dram=True)
)
SLIDING = register(FootprintTerm("sliding", "the model's own sliding windows"))
MASKS = register(FootprintTerm("masks", "the mask of a chunk, in layers without an operator"))
RESIDENT = register(
    FootprintTerm("resident", "representatives, chosen or all blocks, and tables of a GPU that chooses or attends")
)
FOLLOWING = register(FootprintTerm("following", "intermediate results of a prompt's attention (prefill; an estimate)"))
UNTOUCHED = register(FootprintTerm("untouched", "layers without an operator"))
STATES = register(FootprintTerm("states", "states of layers without attention"))


@dataclass(frozen=True)
class BytesPerToken:
    """Bytes of one token in DRAM blocks.

    Attributes:
        keys, values: of the token.
        representatives: the token's share of its block's representatives and, for types that need it, of the attention
            that each key received.
    """

    keys: float = 0
    values: float = 0
    representatives: float = 0

    def __add__(self, other: BytesPerToken) -> BytesPerToken:
        return BytesPerToken(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.keys + self.values + self.representatives


@dataclass(frozen=True)
class MemoryDemand:
    """The workload that memory is planned for.

    Attributes:
        tokens: of each sequence.
        forward_tokens: tokens of a prompt that pass through all layers at once; `tokens` unless a layer has strides.
        batch: sequences that are processed together.
        caches: the cache and its forks, each with `batch` sequences of `tokens`, nothing shared.
        element: bytes of one number on the compute device.
        on_gpu: whether the compute device is a GPU.
        chunk_tokens: tokens of a prompt that pass through a layer at once.
        heads: query heads.
        sparse_drafts: whether the tokens of all sequences are guessed by attention to few blocks.
    """

    tokens: int
    forward_tokens: int
    batch: int
    caches: int
    element: int
    on_gpu: bool
    chunk_tokens: int
    heads: int
    sparse_drafts: bool

    @property
    def sequences(self) -> int:
        """Sequences of all caches."""
        return self.batch * self.caches


class MemoryShare(NamedTuple):
    """Bytes of one layer under a term.

    Layers use a `common` share in turn: of those with an equal value only the largest one counts, once.
    """

    term: FootprintTerm
    size: int
    common: Hashable = False


class TokenReads(NamedTuple):
    """What attending to a decoded token of one sequence reads of DRAM, in bytes.

    Attributes:
        by_cpu: by the CPU, where it attends: keys and values, and what they are chosen by.
        chosen: keys and values that a GPU reads over the bus, where it attends, as far as it has them not.
        row: of `chosen` that lie together; 0 for nothing.
    """

    by_cpu: int = 0
    chosen: int = 0
    row: int = 0

    def plus(self, other: TokenReads) -> TokenReads:
        """Those of both, with the smaller rows."""
        rows = [each for each in (self.row, other.row) if each]
        return TokenReads(self.by_cpu + other.by_cpu, self.chosen + other.chosen, min(rows, default=0))


@dataclass(frozen=True)
class LayerFootprint:
    """One layer's keys and values; by default all of them, on the compute device. Families override what differs.

    Attributes:
        shape: of the keys and values.
        stored: bytes per token in DRAM blocks.
        block_size: tokens of such a block; None for a layer without blocks.
    """

    shape: KVShape
    _: KW_ONLY
    stored: BytesPerToken = BytesPerToken()
    block_size: int | None = None

    @property
    def place(self) -> str:
        """How the layer stores its tokens, a text that completes "32 layers"."""
        return "whole, where the model computes"

    @property
    def prefills_whole(self) -> bool:
        """Whether prefill has all keys and values of a prompt in memory at once, in addition to `shares`."""
        return False

    @property
    def passes_in_strides(self) -> bool:
        """Whether its cache layer runs in strides (`FamilyLayer.is_strided`), even if one stride takes all tokens."""
        return False

    def forward_tokens(self, tokens: int) -> int:
        """Tokens of a prompt of `tokens` that pass through the layer at once; fewer than all with strides."""
        return tokens

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        """The layer's memory after the prefill of a prompt."""
        yield MemoryShare(UNTOUCHED, demand.sequences * self.kv_bytes(demand.tokens, demand))

    def token_reads(self, tokens: int) -> TokenReads:
        """What a token after `tokens` others reads, in a layer that a GPU may attend to (`attend_on`)."""
        return TokenReads()

    def kv_bytes(self, tokens: int, demand: MemoryDemand) -> int:
        """Bytes of the keys and values of `tokens` on the compute device."""
        return tokens * self.shape.bytes_per_token(demand.element)

    def block_shares(self, tokens: int, demand: MemoryDemand) -> Iterator[MemoryShare]:
        """The memory of `tokens`, a number of whole blocks, in DRAM blocks."""
        yield MemoryShare(KEYS_VALUES, demand.sequences * round(tokens * (self.stored.keys + self.stored.values)))
        yield MemoryShare(REPRESENTATIVES, demand.sequences * round(tokens * self.stored.representatives))


@dataclass(frozen=True)
class UntouchedFootprint(LayerFootprint):
    """A layer without an operator: transformers keeps all its tokens."""

    @property
    def place(self) -> str:
        return "without an operator"

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        yield from super().shares(demand)
        yield mask_share(demand.tokens, demand)


@dataclass(frozen=True, kw_only=True)
class WindowFootprint(LayerFootprint):
    """A layer with the model's own sliding window, with or without an operator.

    Attributes:
        sliding_window: keys that a query sees, itself included.
        is_untouched: whether it has no operator, so that transformers' attention needs a mask.
    """

    sliding_window: int
    is_untouched: bool = False

    @property
    def place(self) -> str:
        return f"with a sliding window of {self.sliding_window} tokens"

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        # The buffer of a window has slack for as many tokens again.
        stored = min(demand.tokens, self.sliding_window) + self.sliding_window
        yield MemoryShare(SLIDING, demand.sequences * self.kv_bytes(stored, demand))
        if self.is_untouched:
            yield mask_share(min(demand.tokens, self.sliding_window + demand.chunk_tokens), demand)


@dataclass(frozen=True, kw_only=True)
class StateFootprint(LayerFootprint):
    """A recurrent module's state of fixed size, of a layer of its own or beside attention.

    Attributes:
        state_bytes: of one sequence.
    """

    state_bytes: int

    @property
    def place(self) -> str:
        return "with a state"

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        # The state and its copy for the rollback of a failed forward.
        yield MemoryShare(STATES, 2 * demand.sequences * self.state_bytes)


def sums_share(queries: int, keys: int, shape: KVShape, demand: MemoryDemand) -> MemoryShare:
    """The attention that `keys` received from `queries`, while a GPU sums it; a CPU's tiles are small."""
    counts = queries, keys, demand.batch, demand.heads, shape.kv_heads, shape.k_dim
    return MemoryShare(FOLLOWING, working_bytes(*counts) if demand.on_gpu and queries else 0, common=True)


def mask_share(keys: int, demand: MemoryDemand) -> MemoryShare:
    """The mask of a chunk's queries over `keys`, an estimate.

    It exists as booleans twice, during and after its construction, and as the numbers that attention adds to its
    scores.
    """
    return MemoryShare(MASKS, demand.batch * demand.chunk_tokens * keys * (2 + demand.element), common=True)
