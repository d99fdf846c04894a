"""MagicPIG (Chen et al. 2024, arXiv:2410.16179): samples tokens by hash collisions, with importance weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.cpu_ops.hash_collisions import collisions
from hetero_kv.cpu_ops.sparse_gather import token_scores
from hetero_kv.families.token_retrieval.choosers.chooser import Chooser, ContextAttention, LearnedState, TokenQuery
from hetero_kv.families.token_retrieval.choosers.chooser_settings import MagicPIGSettings
from hetero_kv.families.token_retrieval.choosers.key_components import keys_in_parts
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import AuxiliaryArray
from hetero_kv.store.storage import FP32, StorageType

#: Hash codes of up to 16 bits.
CODES = StorageType("codes", "float16", "int16", 2, "hash codes: 2 bytes each")
#: Number of tables in which a query and a key must agree.
LEAST_COLLISIONS = 2
# A key whose distance from the centre, relative to the centre's norm, is at most this equals it up to rounding.
_AT_CENTRE = 1e-5
# Blocks hashed at once; this bounds the temporary float32 products of their keys.
_AT_ONCE = 16


class MagicPIG(Chooser[MagicPIGSettings]):
    """Section 4. Each query head samples separately.

    Keys are centred by the mean of the Context's first keys, or by the mean of all keys after a longer prompt.
    """

    learns = True
    reads_outside_lse = False

    def __init__(self, settings: MagicPIGSettings, layer_idx: int) -> None:
        super().__init__(settings, layer_idx)
        self._planes: dict[int, torch.Tensor] = {}

    def arrays(self, shape: KVShape) -> Mapping[str, AuxiliaryArray]:
        block_size = self.settings.block_size
        codes = AuxiliaryArray((self.settings.hash_tables,), block_size, CODES)
        return {"key_codes_by_table": codes, "centred_norms": AuxiliaryArray((), block_size, FP32)}

    def known_shapes(self, shape: KVShape) -> Mapping[str, tuple[tuple[int | None, ...], torch.dtype]]:
        return {"centre": ((shape.kv_heads, shape.k_dim), torch.float32)}

    def finalize(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, known: LearnedState) -> LearnedState:
        if not known:
            known = {"centre": torch.stack([_centre(pool, table, first, end) for table in tables])}
        for table, centre in zip(tables, known["centre"], strict=True):
            for ids, keys in keys_in_parts(pool, table, first, end, _AT_ONCE):
                centred = keys - centre[:, None]
                pool.auxiliary["key_codes_by_table"][ids] = self.codes(centred).transpose(2, 3).contiguous()
                pool.auxiliary["centred_norms"][ids] = centred.norm(dim=3)
        return known

    def codes(self, vectors: torch.Tensor) -> torch.Tensor:
        """Hash codes of vectors [..., dim], one per table: [..., tables] int16, used as bit patterns."""
        bits, dim = self.settings.hash_bits, vectors.shape[-1]
        if dim not in self._planes:
            # Each layer draws different planes from the seed, so that layers miss different tokens.
            generator = torch.Generator().manual_seed(hash((self.settings.seed, self.layer_idx)) % 2**63)
            self._planes[dim] = torch.randn(dim, self.settings.hash_tables * bits, generator=generator)
        sides = (vectors @ self._planes[dim] > 0).unflatten(-1, (self.settings.hash_tables, bits))
        return (sides * 2 ** torch.arange(bits)).sum(dim=-1).to(torch.int32).to(torch.int16)

    def attend(self, query: TokenQuery) -> ContextAttention:
        q = torch.from_numpy(query.q)
        rows, kv_heads, group = q.shape[:3]
        codes, table = query.pool.auxiliary_kernel_arrays["key_codes_by_table"].view(np.uint16), query.context
        hashed = self.codes(q).numpy().view(np.uint16)
        hits = collisions(hashed, codes, table, LEAST_COLLISIONS, query.threads).reshape(rows, kv_heads * group, -1)
        counts = hits.sum(axis=2, dtype=np.int32)
        positions = np.zeros((*counts.shape, max(1, int(counts.max(initial=0)))), np.int32)
        for row, head in np.ndindex(*counts.shape):
            positions[row, head, : counts[row, head]] = np.flatnonzero(hits[row, head])
        log_weights = -torch.log(self._chances(query, q, positions, counts))
        attended = query.attend(positions, counts, log_weights)
        tokens = float(counts.mean())
        read = query.tokens * kv_heads * self.settings.hash_tables * codes.itemsize
        # A token sampled by several query heads of a kv head is read once for each.
        repeated = float(counts.sum() / rows - tokens * kv_heads)
        key_and_value = (query.pool.keys[0].nbytes + query.pool.values[0].nbytes) // (kv_heads * query.pool.block_size)
        return ContextAttention(*attended, tokens, read + repeated * key_and_value)

    def _chances(self, query: TokenQuery, q: torch.Tensor, positions: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        """The probability with which each token's query head samples it, [rows, heads, n]."""
        rows, kv_heads, group, k_dim = q.shape
        pool, table, heads = query.pool, query.context, kv_heads * group
        by_head = q.reshape(rows, heads, 1, k_dim)
        products = torch.from_numpy(
            token_scores(by_head.numpy(), pool.key_array, table, positions, counts, pool.offset_array, query.threads)
        ).squeeze(2)
        off = (q * query.known["centre"][:, :, None]).sum(dim=3).view(rows, heads, 1)
        at = torch.from_numpy(positions).long()
        ids = torch.from_numpy(table).long().gather(1, at.div(pool.block_size, rounding_mode="floor").flatten(1))
        of_head = torch.arange(heads).div(group, rounding_mode="floor")[None, :, None]
        norms = pool.auxiliary["centred_norms"][ids.view_as(at), of_head, at % pool.block_size]
        cosine = (products - off) / (by_head.norm(dim=3) * norms).clamp_min(torch.finfo(torch.float32).tiny)
        # A key equal to the centre up to rounding has no direction; its codes collide as at a right angle.
        sizes = query.known["centre"].norm(dim=2).repeat_interleave(group, dim=1)[..., None]
        cosine = cosine.masked_fill(norms <= _AT_CENTRE * sizes, 0)
        return sampling_chance(cosine, self.settings.hash_bits, self.settings.hash_tables)

    def attended_tokens(self, tokens: int) -> float:
        # Computed for keys at right angles to the query, which most keys nearly are.
        return tokens * float(sampling_chance(torch.zeros(()), self.settings.hash_bits, self.settings.hash_tables))


def sampling_chance(cosine: torch.Tensor, bits: int, tables: int) -> torch.Tensor:
    """The probability that at least `LEAST_COLLISIONS` of `tables` codes of `bits` bits agree, at this cosine (section
    4).

    Clamped to the smallest normal float32, because the weights divide by it.
    """
    side = 1 - torch.acos(cosine.double().clamp(-1, 1)) / math.pi
    collides = side**bits
    misses = torch.log1p(-collides.clamp(max=1 - 1e-15))
    chance = -torch.expm1(tables * misses) - tables * collides * torch.exp((tables - 1) * misses)
    return chance.clamp(torch.finfo(torch.float32).tiny, 1).float()


def _centre(pool: BlockPool, table: np.ndarray, first: int, end: int) -> torch.Tensor:
    """The mean of a row's keys in the blocks [first, end), [kv_heads, k_dim]."""
    parts = keys_in_parts(pool, table, first, end, _AT_ONCE)
    return torch.stack([keys.mean(dim=(0, 2)) * len(ids) for ids, keys in parts]).sum(dim=0) / (end - first)
