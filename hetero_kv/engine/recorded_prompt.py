"""What an operator needs of a prompt's exact prefill to go on from it as if it had been its own."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class RecordedPrompt(Protocol):
    """One layer's keys and values of a prompt, and what can be told of its queries.

    Attributes:
        keys: [1, kv_heads, held, k_dim] in the model's dtype, as the attention receives them; `held` is `length`, or
            in a layer with a sliding window of the model's own at most that window less one: the newest.
        values: [1, kv_heads, held, v_dim].
        length: tokens of the prompt.
        rotation: (cos, sin) of all positions, [1, length, width], as the model gives them to its attention; None where
            it gives none.
    """

    @property
    def keys(self) -> torch.Tensor: ...

    @property
    def values(self) -> torch.Tensor: ...

    @property
    def length(self) -> int: ...

    @property
    def rotation(self) -> tuple[torch.Tensor, torch.Tensor] | None: ...

    def show_last_queries(self, observation: Any) -> None:
        """Let an empty observation window see the last queries, as if the prompt had just been prefilled.

        Raises HeteroKVError when fewer were recorded than it watches.
        """
