"""The record of an exact prefill, from which an operator continues as if it had prefilled the prompt itself."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class RecordedPrompt(Protocol):
    """One layer's keys and values of a prompt, and its last queries.

    Attributes:
        keys: [1, kv_heads, stored, k_dim] in the model's dtype, as the attention receives them; `stored` is `length`,
            or in a layer with the model's sliding window at most that window less one: the newest.
        values: [1, kv_heads, stored, v_dim].
        length: tokens of the prompt.
        rotation: (cos, sin) of all positions, [1, length, width], as the model passes them to its attention; None where
            it passes none.
    """

    @property
    def keys(self) -> torch.Tensor: ...

    @property
    def values(self) -> torch.Tensor: ...

    @property
    def length(self) -> int: ...

    @property
    def rotation(self) -> tuple[torch.Tensor, torch.Tensor] | None: ...

    def observed_by(self, observation: Any) -> Any:
        """An empty observation window after the last queries, as if the prompt had just been prefilled.

        Raises HeteroKVError when the window needs more queries than were recorded.
        """
