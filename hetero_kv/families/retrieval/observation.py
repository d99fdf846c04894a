"""The observation window: a prompt's last queries, whose attention shows which keys matter (SnapKV, section 4)."""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.column_sums import column_sums


class Observation:
    """The last `window` queries of a prompt and the log-sum-exp of their attention, collected chunk by chunk.

    Attributes:
        q: [batch, heads, n, k_dim], n up to `window`; None before the first chunk.
        lse: [batch, heads, n] float32, over all keys that a query sees.
        scale, softcap: of the scores, as the attention was called with.
        known: the result of `accumulated_attention` for the whole sequence, if it has been computed already.

    It is replaced and not changed, for a rollback returns to the former one.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.q: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        self.scale = 1.0
        self.softcap: float | None = None
        self.known: torch.Tensor | None = None

    def grown(self, q: torch.Tensor, lse: torch.Tensor, scale: float, softcap: float | None) -> Observation:
        """The window after a chunk's queries [batch, heads, tokens, k_dim] with their lse [batch, heads, tokens]."""
        q, lse = q[:, :, -self.window :], lse[:, :, -self.window :]
        if self.q is not None and self.lse is not None and q.shape[2] < self.window:
            q, lse = torch.cat([self.q, q], dim=2), torch.cat([self.lse, lse], dim=2)
        # Clones, because slices would keep the whole chunk's queries alive.
        grown = Observation(self.window)
        grown.q, grown.lse = q[:, :, -self.window :].clone(), lse[:, :, -self.window :].clone()
        grown.scale, grown.softcap = scale, softcap
        return grown

    def accumulated_attention(self, keys: torch.Tensor) -> torch.Tensor:
        """Attention that each key of the sequence received from the window: [batch, kv_heads, length] float32.

        Args:
            keys: [batch, kv_heads, length, k_dim], of the whole sequence, including the window's.
        """
        return self.attention_to(keys, 0, keys.shape[2]) if self.known is None else self.known

    def attention_to(self, keys: torch.Tensor, start: int, length: int) -> torch.Tensor:
        """Attention that some keys received from the window: [batch, kv_heads, n] float32.

        Args:
            keys: [batch, kv_heads, n, k_dim], for the positions from `start` on in a sequence of `length` tokens.
        """
        assert self.q is not None
        assert self.lse is not None
        past = length - self.q.shape[2] - start
        return column_sums(self.q, self.lse, keys, self.scale, self.softcap, past=past).sum(dim=2)

    def selected(self, rows: list[int]) -> Observation:
        """The window after a selection of rows: row i takes that of row `rows[i]`."""
        chosen = Observation(self.window)
        if self.q is not None and self.lse is not None:
            chosen.q, chosen.lse = self.q[rows], self.lse[rows]
        chosen.scale, chosen.softcap = self.scale, self.softcap
        return chosen

    def to(self, device: torch.device) -> Observation:
        """The same window on `device`; copies nothing if it is there already."""
        moved = Observation(self.window)
        if self.q is not None and self.lse is not None:
            moved.q, moved.lse = self.q.to(device), self.lse.to(device)
        moved.scale, moved.softcap = self.scale, self.softcap
        return moved
