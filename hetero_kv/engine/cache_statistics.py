"""Memory and statistics of a batch, over all its groups."""

from __future__ import annotations

from typing import Any

from hetero_kv.engine.batch import Batch
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.statistics import row_means
from hetero_kv.engine.store import Store
from hetero_kv.errors import OutOfMemoryError


class CacheStatistics(Batch):
    """A batch that reports its memory and statistics; each property says whether it counts the blocks of forks."""

    @property
    def _family_layers(self) -> list[FamilyLayer]:
        return [layer for group in self.groups for layer in group.family_layers]

    @property
    def strided_layers(self) -> list[Any]:
        """The bounded layers, whose forwards run in strides, group after group."""
        return [layer for group in self.groups for layer in group.strided_layers]

    @property
    def statistics(self) -> dict[str, list[float | int | None]]:
        """The layers' statistics by name, one value per layer; None for a layer without that statistic.

        A value is the mean over the rows; with several lengths, over the rows that have a value.
        """
        return row_means([(len(group.sequences), group.statistics) for group in self.groups])

    @property
    def _stores(self) -> dict[int, Store]:
        return {id(group.store): group.store for group in self.groups}

    @property
    def dram_bytes(self) -> int:
        """DRAM of the tokens in operator layers, including the blocks of all forks, bytes."""
        return sum(store.dram_bytes for store in self._stores.values()) + sum(
            layer.dram_bytes for layer in self._family_layers
        )

    @property
    def device_bytes(self) -> int:
        """Memory of the tokens on the compute device, beyond `dram_bytes`, bytes.

        ShadowKV's factors, landmarks and exact chunks; rotary tables; on a GPU also the entries of bounded layers, and
        the copies of the attention sink and the recent window.
        """
        tables = {id(table): table.nbytes for layer in self._family_layers for table in layer.tables_shared_with_others}
        return sum(layer.device_bytes for layer in self._family_layers) + sum(tables.values())

    @property
    def shared_bytes(self) -> int:
        """Bytes of the blocks that this cache shares with its forks."""
        return sum(
            store.shared_bytes(
                sequence for group in self.groups if group.store is store for sequence in group.sequences
            )
            for store in self._stores.values()
        )

    def ran_out_of_memory(self, error: Exception, batch: int, tokens: int) -> OutOfMemoryError:
        """The error for a forward of `tokens` new tokens of each of `batch` sequences that ran out of memory."""
        return self._maker.ran_out_of_memory(
            error,
            batch,
            stored=self.columns.count,
            tokens=tokens,
            capacity=self.max_seq_len,
            stored_bytes=self.dram_bytes,
        )
