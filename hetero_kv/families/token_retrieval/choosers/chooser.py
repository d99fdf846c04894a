"""The interface of choosers: the decode query that they receive, and the attention that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.cpu_ops.attention import attend_blocks
from hetero_kv.cpu_ops.sparse_gather import token_scores, token_values
from hetero_kv.engine.attention_record import AttentionRecord
from hetero_kv.families.retrieval.device_context import DeviceChoice
from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings
from hetero_kv.settings.former_names import refuse_former_methods
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import AuxiliaryArray
from hetero_kv.store.storage import StorageType

S = TypeVar("S", bound=TokenSettings)

#: State that a chooser has learned from the sequences of a batch: [rows, ...] tensors on the CPU; replaced, never
#: modified.
LearnedState = Mapping[str, torch.Tensor]
NOTHING_LEARNED: LearnedState = {}
#: A prompt of at least this many times the learned tokens makes the chooser learn again.
RELEARN_FACTOR = 4


class TokenAttention(NamedTuple):
    """Attention to lists of tokens, one list per kv head or query head.

    Attributes:
        out: [rows, kv_heads, group, v_dim] float32.
        lse: [rows, kv_heads, group], log-sum-exp of the weighted scores.
        mass: [rows, kv_heads, group], log-sum-exp with every token counted once.
    """

    out: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor


class ContextAttention(NamedTuple):
    """A chooser's attention to the Context in one step.

    Attributes:
        out: [rows, kv_heads, group, v_dim] float32, estimates included.
        lse: [rows, kv_heads, group] float32, by which `out` is merged with the attention to other tokens.
        mass: [rows, kv_heads, group], log-sum-exp of the attended tokens, each counted once.
        tokens: attended tokens per kv head, on average.
        read: bytes read per row, apart from the attended keys and values.
        share: estimated share of the attention mass in the attended tokens and those outside the Context; None if it is
            not estimated.
    """

    out: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor
    tokens: float
    read: float
    share: float | None = None


class ChosenTokens(NamedTuple):
    """Chosen tokens of the Context.

    Attributes:
        positions: [rows, kv_heads, n] int32, of which the first `counts` are valid.
        counts: [rows, kv_heads] int32.
        read: bytes read to choose them, per row.
    """

    positions: np.ndarray
    counts: np.ndarray
    read: float


class TokenQuery(NamedTuple):
    """The query of a decoded token in every row, and the keys and values that it may attend to.

    Attributes:
        q: [rows, kv_heads, group, k_dim] float32.
        table: [rows, blocks] int32, block ids of each row; blocks [first, end) are the Context.
        lengths: [num_blocks] int32, tokens in each block.
        scale, softcap: scaling and capping of scores; softcap 0 for none.
        outside_lse: log-sum-exp of the scores of all tokens outside the Context, [rows, kv_heads, group] float32.
        known: the state that the chooser learned when blocks were finalized.
        ahead: the choice made before the query was known, if the chooser looks ahead.
        record: where the attention to single tokens is recorded; None for no record.
    """

    q: np.ndarray
    pool: BlockPool
    table: np.ndarray
    first: int
    end: int
    lengths: np.ndarray
    scale: float
    softcap: float
    outside_lse: torch.Tensor
    known: LearnedState
    threads: int
    ahead: ChosenTokens | None = None
    record: AttentionRecord | None = None

    @property
    def context(self) -> np.ndarray:
        """The ids of the Context's blocks, [rows, blocks] int32."""
        return np.ascontiguousarray(self.table[:, self.first : self.end])

    @property
    def other_blocks(self) -> np.ndarray:
        """The ids of the other blocks, [rows, blocks] int32."""
        return np.concatenate([self.table[:, : self.first], self.table[:, self.end :]], axis=1)

    @property
    def tokens(self) -> int:
        """Number of tokens of the Context."""
        return (self.end - self.first) * self.pool.block_size

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Scale and cap inner products for the softmax."""
        scores = scores * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def attend_blocks(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to all tokens of the blocks `ids` [rows, blocks]: out and lse, as in `TokenAttention`."""
        lists = np.ascontiguousarray(ids[:, None])
        counts = np.full(lists.shape[:2], lists.shape[2], np.int32)
        pool = self.pool
        out, lse = attend_blocks(
            self.q, pool.key_array, pool.value_array, lists, counts, self.lengths, self.scale, self.softcap,
            threads=self.threads, key_offsets=pool.offset_array,
        )  # fmt: skip
        return torch.from_numpy(out), torch.from_numpy(lse)

    def attend(
        self, positions: np.ndarray, counts: np.ndarray, log_weights: torch.Tensor | None = None
    ) -> TokenAttention:
        """Attention to the Context's tokens at `positions` [rows, lists, n] int32, `counts` [rows, lists] of each list.

        There is one list per kv head or one per query head, in order. log_weights: [rows, lists, n], the logarithm of
        each token's weight.
        """
        rows, kv_heads, group, k_dim = self.q.shape
        lists = rows, positions.shape[1], kv_heads * group // positions.shape[1]
        pool, table = self.pool, self.context
        chosen = table, positions, counts
        products = token_scores(self.q.reshape(*lists, k_dim), pool.key_array, *chosen, pool.offset_array, self.threads)
        scores = self.capped(torch.from_numpy(products))
        # tanh has made the padding after the lists' ends finite.
        beyond = torch.arange(positions.shape[2]) >= torch.from_numpy(counts)[:, :, None, None]
        scores.masked_fill_(beyond, -torch.inf)
        weighted = scores if log_weights is None else scores + log_weights[:, :, None]
        if self.record is not None:
            # One sequence alone has a record.
            places = torch.from_numpy(positions[0]).long() + self.first * pool.block_size
            self.record.add(weighted[0], places)
        mass, lse = (torch.logsumexp(each, dim=3) for each in (scores, weighted))
        weights = torch.exp(weighted - lse.masked_fill(torch.isneginf(lse), 0)[..., None])
        out = token_values(weights.contiguous().numpy(), pool.value_array, *chosen, self.threads)
        heads = rows, kv_heads, group
        return TokenAttention(torch.from_numpy(out).view(*heads, -1), lse.view(heads), mass.view(heads))


class Chooser(ABC, Generic[S]):
    """Chooses among the Context's tokens at decode, and defines the arrays kept per block for that.

    An instance belongs to one layer of a model and has no state of any sequence. That is in the pool's arrays
    (`arrays`) and in `LearnedState`, which the layer passes in.
    """

    #: Whether `finalize` learns something about the sequence and derives block arrays from it.
    learns: ClassVar[bool] = False
    #: Whether `choose` selects tokens for a predicted query; `attend` then receives the choice as `TokenQuery.ahead`.
    looks_ahead: ClassVar[bool] = False
    #: Whether `attend` reads `TokenQuery.outside_lse`. If not, it is NaN on a GPU.
    reads_outside_lse: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_former_methods(cls, {"close": "finalize", "reads_beside": "reads_outside_lse"})

    def __init__(self, settings: S, layer_idx: int) -> None:
        self.settings = settings
        self.layer_idx = layer_idx

    def require_suitable(self, path: str, shape: KVShape) -> None:
        """Raise HeteroKVError, naming `path`, for keys of an unsupported shape."""

    @classmethod
    def gpu_obstacle(cls, settings: S) -> str | None:
        """What of a choice with these settings only the CPU does, because of which `attend_on: gpu` is refused."""
        return f"chooser {settings.chooser} runs on the CPU"

    def on_gpu(self, sink_blocks: int) -> DeviceChoice:
        """How a GPU chooses, where there is no obstacle, in sequences with an attention sink of these blocks."""
        raise NotImplementedError("a chooser without an obstacle must implement `on_gpu`")

    @abstractmethod
    def arrays(self, shape: KVShape) -> Mapping[str, AuxiliaryArray]:
        """The arrays that it keeps per block and kv head, by name."""

    @abstractmethod
    def finalize(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, known: LearnedState) -> LearnedState:
        """Derive the arrays of blocks [first, end) of every row, which are full and enter the Context.

        tables: [rows, blocks] int32, block ids of each row. Returns the new learned state.
        """

    @property
    def segment_tokens(self) -> int:
        """Number of tokens that `finalize` processes together; 0 if it derives each block separately."""
        return 0

    @property
    def observed_queries(self) -> int:
        """Number of last queries of a prompt that `learned` receives; 0 for none."""
        return 0

    def learned(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, queries: torch.Tensor) -> LearnedState:
        """The learned state after a prompt, before `finalize` is first called with the same blocks.

        queries: the prompt's last ones, [rows, heads, n, k_dim] float32.
        """
        return NOTHING_LEARNED

    def choose(self, query: TokenQuery) -> ChosenTokens:
        """Choose tokens for a query that may be a guess; the newest token's key may not be stored yet."""
        raise NotImplementedError("a chooser that looks ahead must implement `choose`")

    @abstractmethod
    def attend(self, query: TokenQuery) -> ContextAttention:
        """Attention of one query per head to the Context, which is not empty."""

    @abstractmethod
    def attended_tokens(self, tokens: int) -> float:
        """Tokens that a kv head attends to in a Context of `tokens`; the expected number if each step decides."""

    def covers(self, tokens: int) -> bool:
        """Whether a Context of `tokens` tokens is attended to in full, without a choice."""
        return False

    #: Settings that do not affect what is stored.
    choosing: ClassVar[frozenset[str]] = frozenset()

    def known_shapes(self, shape: KVShape) -> Mapping[str, tuple[tuple[int | None, ...], torch.dtype]]:
        """The entries of `LearnedState` per row: name -> (shape, None for any extent; dtype)."""
        return {}

    def is_outgrown(self, learned: int, tokens: int) -> bool:
        """Whether a prompt that brings the sequence to `tokens` tokens replaces what `learned` tokens have taught."""
        return tokens >= RELEARN_FACTOR * learned

    def kept_until(self, known: LearnedState, learned: int, full: int, context_end: int) -> int:
        """The number of first blocks whose derived arrays stay valid when all but the first `full` blocks are removed.

        known: was learned from the first `learned` blocks. context_end: the block at which the Context now ends, at
        most `full`. Returns 0 if nothing stays valid, `known` included.
        """
        return full if full >= learned else 0


def every_index(rows: int, kv_heads: int, count: int) -> np.ndarray:
    """0 .. count - 1 for each row and kv head, [rows, kv_heads, count] int32, contiguous for kernels."""
    return np.broadcast_to(np.arange(count, dtype=np.int32), (rows, kv_heads, count)).copy()


def encoded(storage: StorageType, vectors: torch.Tensor) -> torch.Tensor:
    """Encode vectors in `storage`; numbers beyond its range become its largest."""
    return storage.encode(vectors if storage.largest is None else vectors.clamp(-storage.largest, storage.largest))


def merged(first: Any, second: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys, (out, lse) each; see `gpu_ops.merge.merge_attention`."""
    from hetero_kv.gpu_ops.merge import merge_attention_in_torch

    return merge_attention_in_torch(*first, *second)
