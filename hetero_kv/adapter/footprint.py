"""What one layer's keys and values take in memory: the protocol by which a family tells the planner.

A family's operator returns a `LayerFootprint` of its own (`AttentionOperator.footprint`). Its `shares` are bytes under
names, `Term`s, which `hetero-kv plan` prints and writes to JSON, whoever registered them:

    SKETCHES = register(Term("sketches", "sketches of the keys"))

    @dataclass(frozen=True)
    class SketchFootprint(LayerFootprint):
        def shares(self, demand: Demand) -> Iterator[Share]:
            yield Share(SKETCHES, demand.sequences * demand.tokens * 16)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import NamedTuple

from gpu_ops.column_sums import working_bytes
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.errors import HeteroKVError


@dataclass(frozen=True)
class Term:
    """What a part of the memory is for.

    Attributes:
        name: in JSON.
        meaning: one line for the plan's table.
        in_dram: whether it lies in DRAM whatever the model computes on; else where it computes.
    """

    name: str
    meaning: str
    in_dram: bool = False


_TERMS: dict[str, Term] = {}


def register(term: Term) -> Term:
    """Make a term known under its name. Raises HeteroKVError for a name that another term has."""
    if _TERMS.setdefault(term.name, term) != term:
        raise HeteroKVError(
            f"the term {term.name!r} of a footprint is registered already, as {_TERMS[term.name].meaning!r}; give "
            f"{term.meaning!r} another name"
        )
    return term


def terms() -> tuple[Term, ...]:
    """The registered terms, in order of registration."""
    return tuple(_TERMS.values())


KEYS_VALUES = register(Term("keys_values", "keys and values, in blocks", in_dram=True))
REPRESENTATIVES = register(Term("representatives", "representatives of the blocks", in_dram=True))
SLIDING = register(Term("sliding", "the model's own sliding windows"))
MASKS = register(Term("masks", "the mask of a chunk, in layers without an operator"))
FOLLOWING = register(Term("following", "what layers compute of a prompt's attention and keys (prefill; an estimate)"))
UNTOUCHED = register(Term("untouched", "layers without an operator"))
STATES = register(Term("states", "states of layers that are no attention"))


@dataclass(frozen=True)
class BytesPerToken:
    """What one token takes in DRAM blocks, bytes.

    Attributes:
        keys, values: of the token.
        representatives: its share of what its block is chosen by: the representatives and, for types that need it, the
            attention that each key received.
    """

    keys: float = 0
    values: float = 0
    representatives: float = 0

    def __add__(self, other: BytesPerToken) -> BytesPerToken:
        return BytesPerToken(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def total(self) -> float:
        """All of it."""
        return self.keys + self.values + self.representatives


@dataclass(frozen=True)
class Demand:
    """What memory is wanted for.

    Attributes:
        tokens: of each sequence.
        forward_tokens: tokens of a prompt that pass through all layers at once; `tokens` unless some layer has strides.
        batch: sequences that are processed together.
        caches: the cache and its forks, each with `batch` sequences of `tokens`, nothing shared.
        element: bytes of one number where the model computes.
        on_gpu: whether that is a GPU.
        chunk_tokens: tokens of a prompt that pass through a layer at once.
        heads: of queries.
    """

    tokens: int
    forward_tokens: int
    batch: int
    caches: int
    element: int
    on_gpu: bool
    chunk_tokens: int
    heads: int

    @property
    def sequences(self) -> int:
        """Those of all caches."""
        return self.batch * self.caches


class Share(NamedTuple):
    """What one layer takes under a term, bytes. What is `common` to layers counts once, as the largest of them."""

    term: Term
    size: int
    common: bool = False


@dataclass(frozen=True)
class LayerFootprint:
    """One layer's keys and values: here, all of them where the model computes. Families override what differs.

    Attributes:
        shape: of the keys and values.
        stored: bytes per token in DRAM blocks.
        block_size: tokens of such a block; None where nothing lies in blocks.
    """

    shape: KVShape
    _: KW_ONLY
    stored: BytesPerToken = BytesPerToken()
    block_size: int | None = None

    @property
    def place(self) -> str:
        """How the layer keeps its tokens, as it stands behind "32 layers"."""
        return "whole, where the model computes"

    @property
    def prefills_whole(self) -> bool:
        """Whether all keys and values of a prompt are there at once while it prefills, beside what `shares` counts."""
        return False

    @property
    def passes_in_strides(self) -> bool:
        """Whether its cache layer is asked for strides (`FamilyLayer.is_strided`), be it one of the whole prompt."""
        return False

    def forward_tokens(self, tokens: int) -> int:
        """Tokens of a prompt of `tokens` that pass through the layer at once; fewer than all where it has strides."""
        return tokens

    def shares(self, demand: Demand) -> Iterator[Share]:
        """What the layer takes when a prompt has prefilled."""
        yield Share(UNTOUCHED, demand.sequences * self.kv_bytes(demand.tokens, demand))

    def kv_bytes(self, tokens: int, demand: Demand) -> int:
        """Keys and values of `tokens` where the model computes, bytes."""
        return tokens * self.shape.bytes_per_token(demand.element)

    def block_shares(self, tokens: int, demand: Demand) -> Iterator[Share]:
        """What `tokens`, those of whole blocks, take in DRAM blocks."""
        yield Share(KEYS_VALUES, demand.sequences * round(tokens * (self.stored.keys + self.stored.values)))
        yield Share(REPRESENTATIVES, demand.sequences * round(tokens * self.stored.representatives))


@dataclass(frozen=True)
class UntouchedFootprint(LayerFootprint):
    """A layer without an operator, of which transformers keeps everything."""

    @property
    def place(self) -> str:
        return "without an operator"

    def shares(self, demand: Demand) -> Iterator[Share]:
        yield from super().shares(demand)
        yield mask_share(demand.tokens, demand)


@dataclass(frozen=True, kw_only=True)
class WindowFootprint(LayerFootprint):
    """A layer with a sliding window of the model's own, with an operator or without.

    Attributes:
        sliding_window: keys that a query sees, itself included.
        is_untouched: whether it has no operator, so that transformers' attention wants a mask.
    """

    sliding_window: int
    is_untouched: bool = False

    @property
    def place(self) -> str:
        return f"with a sliding window of {self.sliding_window} tokens"

    def shares(self, demand: Demand) -> Iterator[Share]:
        # A window lies in a buffer with slack for as many tokens again.
        held = min(demand.tokens, self.sliding_window) + self.sliding_window
        yield Share(SLIDING, demand.sequences * self.kv_bytes(held, demand))
        if self.is_untouched:
            yield mask_share(min(demand.tokens, self.sliding_window + demand.chunk_tokens), demand)


@dataclass(frozen=True, kw_only=True)
class StateFootprint(LayerFootprint):
    """A layer that is no attention, whose state does not grow.

    Attributes:
        state_bytes: of one sequence.
    """

    state_bytes: int

    @property
    def place(self) -> str:
        return "that are no attention, with a state"

    def shares(self, demand: Demand) -> Iterator[Share]:
        # And what a forward that fails would come back to.
        yield Share(STATES, 2 * demand.sequences * self.state_bytes)


def sums_share(queries: int, keys: int, shape: KVShape, demand: Demand) -> Share:
    """Sums of attention that `keys` received from `queries`, while a GPU computes them; a CPU's tiles are small."""
    counts = queries, keys, demand.batch, demand.heads, shape.kv_heads, shape.k_dim
    return Share(FOLLOWING, working_bytes(*counts) if demand.on_gpu and queries else 0, common=True)


def mask_share(keys: int, demand: Demand) -> Share:
    """The mask of a chunk's queries over `keys`, an estimate.

    As truth values, while it is made and when it is done, and as the numbers that attention adds to its scores.
    """
    return Share(MASKS, demand.batch * demand.chunk_tokens * keys * (2 + demand.element), common=True)
