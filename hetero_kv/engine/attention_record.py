"""A record of one token's attention in one layer: which keys it attends to, and their shares of the softmax."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.errors import HeteroKVError

#: The largest difference of a record's log-sum-exp from that of the attention itself: 1 % of the softmax's sum.
#: Rounding stays far below it; a record without a key of a larger share exceeds it.
_TOLERANCE = 0.01


class AttentionRecord:
    """The attention of one token of one sequence, summed over bins of neighbouring positions.

    A cache layer may have one (`FamilyLayer.record`). Its operator adds the score of every key that the token attends
    to (`add`), and then divides by the softmax's sum (`complete`).

    Args:
        edges: [bins + 1] int64, rising; bin i has the positions from `edges[i]` up to `edges[i + 1]`.

    Attributes:
        masses: [bins] float32, the shares of the softmax, the mean over query heads.
        chosen: [bins] float32, the share of a bin's tokens that are attended to individually, the mean over lists of
            keys: one list per kv head, or per query head.
        estimated: the share of the softmax in keys that are not attended to individually.
        sink: the share of a learned attention sink.
        is_complete: whether the operator has completed it.
    """

    def __init__(self, edges: np.ndarray) -> None:
        self._edges = torch.from_numpy(edges)
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.masses = self.chosen = np.zeros(len(edges) - 1, np.float32)
        self.estimated = self.sink = 0.0
        self.is_complete = False

    def add(self, scores: torch.Tensor, positions: torch.Tensor) -> None:
        """Add keys that the token attends to individually.

        Args:
            scores: [lists, query heads of a list, keys], the softmax's inputs; -inf where a list lacks a key.
            positions: [keys] or [lists, keys], the keys' positions in the sequence.
        """
        self._parts.append((scores.detach().to("cpu", torch.float32), positions.cpu().expand(len(scores), -1)))

    def add_keys(
        self, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, scale: float, softcap: float | None,
        attended: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """As `add`, with scores computed from keys.

        Args:
            q: [1, heads, 1, k_dim], the token's query.
            keys: [kv_heads, n, k_dim].
            positions: [n] or [kv_heads, n].
            attended: [kv_heads or 1, n] bool, the keys of each list; None for all.
        """
        by_kv_head = q.detach().float().cpu().view(len(keys), -1, q.shape[3])
        # In this order the product takes a quarter of the time.
        scores = (keys.float().cpu() @ by_kv_head.mT).mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if attended is not None:
            scores = scores.masked_fill(~attended[:, None], -torch.inf)
        self.add(scores, positions)

    @property
    def is_empty(self) -> bool:
        """Whether no keys have been added yet."""
        return not self._parts

    @property
    def lse(self) -> torch.Tensor:
        """Log-sum-exp of the scores of all keys that were added: [heads] float64."""
        assert self._parts
        parts = [scores.logsumexp(dim=2).double().flatten() for scores, _ in self._parts]
        return torch.stack(parts).logsumexp(dim=0)

    def complete(
        self, total: torch.Tensor, attended_lse: torch.Tensor | None = None, sink: torch.Tensor | None = None
    ) -> None:
        """Divide by the softmax's sum.

        Args:
            total: log-sum-exp of everything in the softmax; any shape with one number per head, as `attended_lse`.
            attended_lse: log-sum-exp of the keys that it attends to individually; None if these and the sink are
                everything.
            sink: [heads], the scores of a learned sink; None without one.

        Raises HeteroKVError when the keys that were added are not those of the attention.
        """
        own, total = self.lse, _of_heads(total)
        expected, of_sink = total, torch.full_like(total, -torch.inf) if sink is None else _of_heads(sink)
        if attended_lse is None:
            own = torch.logaddexp(own, of_sink)
        else:
            expected = _of_heads(attended_lse)
        difference = float((own - expected).abs().max())
        if not difference <= _TOLERANCE:
            raise HeteroKVError(
                f"the log-sum-exp of the recorded keys differs from that of the attention by {difference:.3g}; the "
                "attention of this layer cannot be recorded"
            )
        self.sink = float((of_sink - total).exp().mean())
        if attended_lse is not None:
            self.estimated = max(0.0, 1 - self.sink - float((expected - total).exp().mean()))
        masses, chosen = (torch.zeros(len(self.masses), dtype=torch.float64) for _ in range(2))
        for scores, positions in self._parts:
            weights = (scores - total.view(len(scores), -1, 1)).exp().sum(dim=1) / len(total)
            bins = torch.bucketize(positions.contiguous(), self._edges, right=True).flatten() - 1
            masses.index_add_(0, bins, weights.flatten())
            is_chosen = (scores > -torch.inf).any(dim=1).double() / len(scores)
            chosen.index_add_(0, bins, is_chosen.flatten())
        self.masses, self.chosen = masses.float().numpy(), (chosen / self._edges.diff()).float().numpy()
        self._parts, self.is_complete = [], True


def _of_heads(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.detach().cpu().double().flatten()
