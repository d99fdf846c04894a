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
        if hidden_states.shape[1] <= self.engine.chunk_size:
            return self.wrapped(hidden_states, *args, **kwargs)
        is_free = chunking.claimed(hidden_states)
        passage = chunking.passage(hidden_states, kwargs, self.engine.chunk_size, is_free)
        for chunk, part, chunk_kwargs in passage.chunks():
            passage.put(chunk, self.wrapped(part, *args, **chunk_kwargs))
        return passage.output()
