"""transformers' cache interface, for a batch of several equal-length groups."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache

from hetero_kv.engine.cache_statistics import CacheStatistics
from hetero_kv.engine.exclusive_use import ExclusiveUse
from hetero_kv.engine.forward_batch import ForwardBatch
from hetero_kv.errors import HeteroKVError


class HFInterface(CacheStatistics, Cache):
    """The methods of transformers' Cache that a batch implements differently, or refuses."""

    in_use: ExclusiveUse
    batch: ForwardBatch | None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding included; with equal lengths, the tokens of each row.

        While a group passes through the model: the length in its layer.
        """
        if self.batch is not None and self.batch.recording is not None:
            self.batch.recording.read_length()
        return self.get_query_offset(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The number of `get_seq_length`, for a mask: that of a decoded token hides nothing, so it may be recorded."""
        batch = self.batch
        if batch is None or len(batch.steps) != 1:
            return self.columns.count
        group = batch.steps[0].group
        return group.length if group.keeps_states_alone else Cache.get_seq_length(self, layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """`max_seq_len`, or -1 where no layer keeps every token."""
        return -1 if self.max_seq_len is None else self.max_seq_len

    @property
    def max_cache_len(self) -> int:
        """`get_max_length`, under the name that PEFT reads."""
        return self.get_max_length()

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can drop the newest tokens; transformers 5.24 reads it before assisted decoding."""
        return all(group.is_croppable for group in self.groups)

    @property
    def required_batch(self) -> ForwardBatch:
        """The forward in progress. Raises HeteroKVError outside of a forward of the injected model."""
        if self.batch is None:
            raise self._maker.stray()
        return self.batch

    def _require_forward(self) -> None:
        if self.batch is None or not self.in_use.is_within:
            raise self._maker.stray()

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See transformers' Cache. Raises HeteroKVError outside of a forward of the injected model."""
        self._require_forward()
        return super().update(*args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `update`."""
        self._require_forward()
        return super().update_conv_state(conv_states, self.state_place(layer_idx), *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """See `update`."""
        self._require_forward()
        return super().update_recurrent_state(recurrent_states, self.state_place(layer_idx), *args, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See transformers' Cache."""
        return super().get_conv_state(self.state_place(layer_idx), state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See transformers' Cache."""
        return super().get_recurrent_state(self.state_place(layer_idx), state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """See transformers' Cache."""
        return super().has_previous_state(None if layer_idx is None else self.state_place(layer_idx), state_idx)

    def state_place(self, layer_idx: int) -> int:
        """The index in `layers` of the state of a layer of the model."""
        group = self.groups[0] if self.batch is None else self.batch.slices[0].group
        return group.state_places.get(layer_idx, layer_idx)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i continue row `beam_idx[i]` (beam search); blocks are shared, not copied."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices` (`select`)."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Always raises HeteroKVError: blocks are planned for the rows of the first prompt."""
        raise HeteroKVError("a HeteroCache cannot repeat its sequences; repeat the prompt before generating")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HeteroKVError(
            "a HeteroCache cannot be pickled (torch.save, multiprocessing): it belongs to a model in this process; "
            "cache.save(path) writes it to a file, and HeteroCache.load(path, model) reads it back"
        )
