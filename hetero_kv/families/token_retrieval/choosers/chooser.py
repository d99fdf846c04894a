"""What a way to choose tokens answers, and what it is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from cpu_ops.attention import attend_blocks
from cpu_ops.token_lists import token_scores, token_values
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings
from hetero_kv.store.pool import Beside, BlockPool
from hetero_kv.store.storage import StorageType

S = TypeVar("S", bound=TokenSettings)

#: What a chooser has learned of a cohort's sequences: [rows, ...] on the CPU each; replaced, never changed.
Known = Mapping[str, torch.Tensor]
NOTHING_KNOWN: Known = {}
#: Times the tokens that something was learned of, which a prompt has at least behind which it is learned anew.
LEARNED_ANEW = 4


class Attended(NamedTuple):
    """Attention to lists of tokens.

    Attributes:
        out: [rows, kv_heads, group, v_dim] float32.
        lse: [rows, kv_heads, group], of the weights.
        mass: likewise, where every token counts once.
    """

    out: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor


class Answer(NamedTuple):
    """What a step attends to of the Context.

    Attributes:
        out: [rows, kv_heads, group, v_dim] float32, estimates included.
        lse: [rows, kv_heads, group] float32, by which it is merged with what is attended to elsewhere.
        mass: likewise, of the tokens that were attended to, each counted once.
        tokens: so many, of a kv head on average.
        read: bytes of a row that were read beside their keys and values.
        share: of the attention mass that they are estimated to have with what is attended to elsewhere; None where that
            is not estimated.
    """

    out: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor
    tokens: float
    read: float
    share: float | None = None


class Choice(NamedTuple):
    """Tokens that are chosen of the Context.

    Attributes:
        positions: [rows, kv_heads, n] int32, the first `counts` of each.
        counts: [rows, kv_heads] int32.
        read: bytes of a row that were read to choose them.
    """

    positions: np.ndarray
    counts: np.ndarray
    read: float


class Asked(NamedTuple):
    """A decoded token of every row.

    Attributes:
        q: [rows, kv_heads, group, k_dim] float32.
        table: [rows, blocks] int32, the ids of all blocks of each row, [first, end) of them the Context.
        lengths: [num_blocks] int32, tokens in each block.
        scale, softcap: of the scores; softcap 0 for none.
        beside: log-sum-exp of the scores of all other tokens, [rows, kv_heads, group] float32.
        known: what was learned when blocks were closed.
        ahead: what was chosen before the query was known, by a chooser that looks ahead.
    """

    q: np.ndarray
    pool: BlockPool
    table: np.ndarray
    first: int
    end: int
    lengths: np.ndarray
    scale: float
    softcap: float
    beside: torch.Tensor
    known: Known
    threads: int
    ahead: Choice | None = None

    @property
    def context(self) -> np.ndarray:
        """The ids of the Context's blocks, [rows, blocks] int32."""
        return np.ascontiguousarray(self.table[:, self.first : self.end])

    @property
    def elsewhere(self) -> np.ndarray:
        """Those of the others."""
        return np.concatenate([self.table[:, : self.first], self.table[:, self.end :]], axis=1)

    @property
    def tokens(self) -> int:
        """Tokens of the Context."""
        return (self.end - self.first) * self.pool.block_size

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Inner products as they go into the softmax."""
        scores = scores * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def attend_blocks(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to all tokens of the blocks `ids` [rows, blocks]: out as `Attended` has it, and lse."""
        lists = np.ascontiguousarray(ids[:, None])
        counts = np.full(lists.shape[:2], lists.shape[2], np.int32)
        pool = self.pool
        out, lse = attend_blocks(
            self.q, pool.key_array, pool.value_array, lists, counts, self.lengths, self.scale, self.softcap,
            threads=self.threads, key_offsets=pool.offset_array,
        )  # fmt: skip
        return torch.from_numpy(out), torch.from_numpy(lse)

    def attend(self, positions: np.ndarray, counts: np.ndarray, log_weights: torch.Tensor | None = None) -> Attended:
        """Attention to the Context's tokens at `positions` [rows, lists, n] int32, `counts` [rows, lists] of each list.

        lists: those of the kv heads, or of the query heads, in order. log_weights: [rows, lists, n], the logarithm of
        how many times a token counts.
        """
        rows, kv_heads, group, k_dim = self.q.shape
        lists = rows, positions.shape[1], kv_heads * group // positions.shape[1]
        pool, table = self.pool, self.context
        given = table, positions, counts
        products = token_scores(self.q.reshape(*lists, k_dim), pool.key_array, *given, pool.offset_array, self.threads)
        scores = self.capped(torch.from_numpy(products))
        # tanh has made finite numbers of what stands behind the lists' ends.
        beyond = torch.arange(positions.shape[2]) >= torch.from_numpy(counts)[:, :, None, None]
        scores.masked_fill_(beyond, -torch.inf)
        weighted = scores if log_weights is None else scores + log_weights[:, :, None]
        mass, lse = (torch.logsumexp(each, dim=3) for each in (scores, weighted))
        weights = torch.exp(weighted - lse.masked_fill(torch.isneginf(lse), 0)[..., None])
        out = token_values(weights.contiguous().numpy(), pool.value_array, *given, self.threads)
        heads = rows, kv_heads, group
        return Attended(torch.from_numpy(out).view(*heads, -1), lse.view(heads), mass.view(heads))


class Chooser(ABC, Generic[S]):
    """How a decoded token chooses among the tokens of the Context, and what is kept of blocks for that.

    An instance belongs to one layer of a model and holds nothing of any sequence: that is in the pool's arrays
    (`arrays`) and in what was learned (`Known`), which the layer hands it.
    """

    #: Whether `close` learns something of the sequence, by which it derives what is kept of blocks.
    learns: ClassVar[bool] = False
    #: Whether it chooses from a query that the layer before guesses (`choose`); `attend` is told its choice.
    looks_ahead: ClassVar[bool] = False
    #: Whether `attend` reads `Asked.beside`; else that is NaN on a GPU, which attends to the window in the meantime.
    reads_beside: ClassVar[bool] = True

    def __init__(self, settings: S, layer_idx: int) -> None:
        self.settings = settings
        self.layer_idx = layer_idx

    def require_suitable(self, path: str, shape: KVShape) -> None:
        """Raise HeteroKVError, naming `path`, for keys of a shape that it does not take."""

    @abstractmethod
    def arrays(self, shape: KVShape) -> Mapping[str, Beside]:
        """What it keeps of every block and kv head."""

    @abstractmethod
    def close(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, known: Known) -> Known:
        """Derive what is kept of the blocks [first, end) of every row, which are full and enter the Context.

        tables: [rows, blocks] int32, ids of the blocks of each row. Returns what is known then.
        """

    @property
    def segment_tokens(self) -> int:
        """Tokens of which `close` derives together what is kept of blocks; 0: each block is derived by itself."""
        return 0

    @property
    def observed_queries(self) -> int:
        """Last queries of a prompt that `learned` sees; 0 where there is none."""
        return 0

    def learned(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, queries: torch.Tensor) -> Known:
        """What is known before `close` is told of the same blocks for the first time, behind a prompt.

        queries: its last, [rows, heads, n, k_dim] float32.
        """
        return NOTHING_KNOWN

    def choose(self, asked: Asked) -> Choice:
        """Tokens for a query that may be a guess, while the newest token's key may not be stored yet."""
        raise NotImplementedError("a chooser that looks ahead chooses")

    @abstractmethod
    def attend(self, asked: Asked) -> Answer:
        """Attention of one query per head to the Context, which has blocks."""

    @abstractmethod
    def attended_tokens(self, tokens: int) -> float:
        """Tokens that a kv head attends to of a Context of so many, as expected where a step decides."""

    def covers(self, tokens: int) -> bool:
        """Whether a Context of so many tokens is attended to in full, without a choice."""
        return False

    #: Settings that decide nothing of what is stored.
    choosing: ClassVar[frozenset[str]] = frozenset()

    def known_shapes(self, shape: KVShape) -> Mapping[str, tuple[tuple[int | None, ...], torch.dtype]]:
        """What `Known` holds of a row once something is known: name -> (shape, None for any extent, dtype)."""
        return {}

    def is_outgrown(self, learned: int, tokens: int) -> bool:
        """Whether what was learned of so many tokens is to be learned anew of all, where a prompt brings `tokens`."""
        return tokens >= LEARNED_ANEW * learned

    def kept_until(self, known: Known, learned: int, full: int, context_end: int) -> int:
        """Up to which block what is kept of blocks holds, where those behind the first `full` are gone.

        known: was learned from the first `learned` blocks. context_end: where the Context ends now, `full` at most.
        0: nothing holds, and nothing is known.
        """
        return full if full >= learned else 0


def every_index(rows: int, kv_heads: int, count: int) -> np.ndarray:
    """0 to count - 1 for each row and kv head, [rows, kv_heads, count] int32, each written out as kernels take them."""
    return np.broadcast_to(np.arange(count, dtype=np.int32), (rows, kv_heads, count)).copy()


def encoded(storage: StorageType, vectors: torch.Tensor) -> torch.Tensor:
    """As `storage` keeps them; numbers beyond its range are its largest."""
    return storage.encode(vectors if storage.largest is None else vectors.clamp(-storage.largest, storage.largest))


def merged(first: Any, second: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, (out, lse) of each: see `gpu_ops.merge.merge_attention`."""
    from gpu_ops.merge import merge_attention_in_torch

    return merge_attention_in_torch(*first, *second)
