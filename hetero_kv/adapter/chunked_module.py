"""Chunked execution of a token-wise module: the final norm, whose temporaries would be as long as the prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetero_kv.adapter import attention_module, chunking
from hetero_kv.adapter.declarations import CHUNKED_MODULE
from hetero_kv.adapter.replacement import Operator
from hetero_kv.errors import UnsupportedModelError


class ChunkedModule(Operator):
    """Runs a token-wise module over chunks of the sequence."""

    meaning = CHUNKED_MODULE.meaning
    prefills_exactly = True
    continues_exactly = True

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        if attention_module.is_attention(module):
            raise UnsupportedModelError(
                f"{path} ({type(module).__name__}) is attention, which mixes tokens; ChunkedModule is for modules "
                "that process each token separately, such as the final norm"
            )

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The wrapped module's output for [batch, tokens, hidden]."""
        if hidden_states.shape[1] <= self.engine.chunk_size:
            return self.wrapped(hidden_states, *args, **kwargs)
        is_free = chunking.claim_reusable(hidden_states)
        chunked_pass = chunking.chunked_pass(hidden_states, kwargs, self.engine.chunk_size, is_free)
        for chunk, part, chunk_kwargs in chunked_pass.chunks():
            chunked_pass.put(chunk, self.wrapped(part, *args, **chunk_kwargs))
        return chunked_pass.output()
