"""A token-wise module over a prompt in chunks: the final norm, whose temporaries would be as long as the prompt."""

from __future__ import annotations

from typing import Any

import torch

from hetero_kv.adapter import chunking
from hetero_kv.adapter.operator import Operator


class ChunkedModule(Operator):
    """Runs a module that treats every token alone over chunks of the sequence."""

    meaning = "runs a token-wise module (the final norm) over the prompt in chunks of chunk_size"
    prefills_exactly = True
    continues_exactly = True

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The wrapped module's output for [batch, tokens, hidden]."""
        total = hidden_states.shape[1]
        if total <= self.engine.chunk_size:
            return self.wrapped(hidden_states, *args, **kwargs)
        output = hidden_states if chunking.claimed(hidden_states) else torch.empty_like(hidden_states)
        for start in range(0, total, self.engine.chunk_size):
            chunk = slice(start, start + self.engine.chunk_size)
            output[:, chunk] = self.wrapped(hidden_states[:, chunk], *args, **kwargs)
        return output
