"""A model with rules that cover everything, and an untouched reference model, called in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support import tiny_tokenizers
from tests.support.tiny_models import tiny_model

TOKENIZER = tiny_tokenizers.byte_level()
TOKENIZER.pad_token, TOKENIZER.padding_side = TOKENIZER.eos_token, "left"
SIZES = {"vocab_size": len(TOKENIZER), "eos_token_id": 5, "pad_token_id": 3, "num_hidden_layers": 2}
MODEL, UNTOUCHED = (tiny_model("llama", 1, **SIZES) for _ in range(2))
ASSISTANT, UNTOUCHED_ASSISTANT = (tiny_model("llama", 2, **{**SIZES, "num_hidden_layers": 1}) for _ in range(2))
EVERYTHING = {
    "top_k_blocks": "all", "kv_type": "FP32", "block_size": 16, "local_windows_len": 32, "sink_tokens": 16,
    "max_seq_len": 400,
}  # fmt: skip
PROMPT = torch.randint(6, 250, (1, 45), generator=torch.Generator().manual_seed(3))
OTHER = torch.randint(6, 250, (1, 9), generator=torch.Generator().manual_seed(4))
TEXT = "hello hello user, hello"


SAMPLED = {"do_sample": True, "temperature": 1.5}


@dataclass
class Call:
    """A model, whether injected or not, and what a way of calling it needs.

    Attributes:
        cache: makes what is passed as `past_key_values`.
        assistant: a smaller model, which is injected where the model is.
    """

    model: Any
    assistant: Any
    cache: Callable[[], Any]

    def generate(self, ids: Any = PROMPT, **kwargs: Any) -> Any:
        """Tokens that are generated greedily, or as `kwargs` say."""
        torch.manual_seed(7)
        settings = {"do_sample": False, "max_new_tokens": 8, "past_key_values": self.cache(), **kwargs}
        return self.model.generate(ids, **{name: value for name, value in settings.items() if value is not ...})


def plain() -> Call:
    return Call(UNTOUCHED, UNTOUCHED_ASSISTANT, lambda: None)


def tokens_of(result: Any) -> list[Any]:
    """What a way gives, as lists that can be compared."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return result if isinstance(result, list | str | float) else result.sequences.tolist()
