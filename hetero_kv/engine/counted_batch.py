"""What the layers of a batch hold and have counted, all cohorts together."""

from __future__ import annotations

from typing import Any

from hetero_kv.engine.batch import Batch
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.statistics import row_means
from hetero_kv.engine.store import Store


class CountedBatch(Batch):
    """A batch that says what it takes; blocks of forks are counted where it says so."""

    @property
    def _family_layers(self) -> list[FamilyLayer]:
        return [layer for cohort in self.cohorts for layer in cohort.family_layers]

    @property
    def strided_layers(self) -> list[Any]:
        """The layers whose forwards are cut into strides, bounded ones: of one cohort after the other."""
        return [layer for layer in self._family_layers if layer.is_strided]

    @property
    def statistics(self) -> dict[str, list[float | int | None]]:
        """What layers have counted, by name, a value for each layer; None where a layer says nothing of that name.

        The mean over the rows; of rows of several lengths, over those of which a layer says something.
        """
        return row_means([(len(cohort.sequences), cohort.statistics) for cohort in self.cohorts])

    @property
    def _stores(self) -> dict[int, Store]:
        return {id(cohort.store): cohort.store for cohort in self.cohorts}

    @property
    def dram_bytes(self) -> int:
        """Bytes that the stored tokens take in operator layers, with the blocks of all forks."""
        return sum(store.dram_bytes for store in self._stores.values()) + sum(
            layer.dram_bytes for layer in self._family_layers
        )

    @property
    def device_bytes(self) -> int:
        """Bytes that the stored tokens take where the model computes, beside `dram_bytes`.

        ShadowKV's factors, landmarks and exact chunks; rotary tables; on a GPU also the entries of bounded layers, and
        the copies of the attention sink and the recent window.
        """
        tables = {id(table): table.nbytes for layer in self._family_layers for table in layer.tables_shared_with_others}
        return sum(layer.device_bytes for layer in self._family_layers) + sum(tables.values())

    @property
    def shared_bytes(self) -> int:
        """Bytes of the blocks that this cache holds together with its forks."""
        return sum(
            store.shared_bytes(
                sequence for cohort in self.cohorts if cohort.store is store for sequence in cohort.sequences
            )
            for store in self._stores.values()
        )
