"""What a ShadowKV layer takes (ShadowKV, arXiv:2410.21465, section 3.2 and figure 2)."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.adapter import rotary_table
from hetero_kv.families.shadowkv import layer as low_rank_layer
from hetero_kv.families.shadowkv.partition import chunk_budget, first_context_end
from hetero_kv.families.shadowkv.settings import ShadowKVSettings


@dataclass(frozen=True)
class LowRankFootprint:
    """Numbers that one sequence takes in one layer where the model computes, when a prompt has been answered to.

    Attributes:
        settings: of the operator.
        keys, values: numbers of one token's keys and of its values, all kv heads.
        k_dim: dimension of a key.
    """

    settings: ShadowKVSettings
    keys: int
    values: int
    k_dim: int

    def context(self, tokens: int) -> int:
        """Tokens of a prompt that have factors, and values in DRAM."""
        return first_context_end(tokens, self.settings)

    def numbers(self, tokens: int) -> int:
        """Factors, landmarks, outliers, slots of chosen chunks, and what is exact, after a prompt of `tokens`.

        The paper's S·r + r·M + S·M/C + 2(K + O)·C·M (whose last M is missing there) of S tokens, M numbers of a token's
        keys, chunks of C tokens, K chosen and O outlier chunks; beside them the newest tokens, and the room that
        buffers have for more.
        """
        settings, context = self.settings, self.context(tokens)
        exact = (tokens - context + low_rank_layer.SLACK) * (self.keys + self.values)
        if context == 0:
            return exact
        chunk_size, chunks = settings.landmark_chunk_size, context // settings.landmark_chunk_size
        slack = low_rank_layer.SLACK if settings.project_generated else 0
        outliers = min(settings.outlier_chunks, chunks)
        chosen = min(chunk_budget(tokens, chunks, settings), chunks - outliers)
        factors = (context + slack) * settings.rank + settings.rank * self.keys
        landmarks = (chunks + slack // chunk_size) * self.keys
        # One more slot takes what a head has rebuilt for nothing.
        resident = (outliers + chosen + 1) * chunk_size * (self.keys + self.values)
        return exact + factors + landmarks + resident

    def rotary(self, tokens: int) -> int:
        """Numbers of the rotary table, which layers share; of heads that are rotated whole."""
        return (tokens + rotary_table.SLACK) * self.k_dim
