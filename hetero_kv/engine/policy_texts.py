"""Token ids of the texts that eviction policies pass through a model, by that model's tokenizer."""

from __future__ import annotations

from typing import Any

from hetero_kv.errors import HeteroKVError


class PolicyTexts:
    """Encodes each text once; the first text loads the tokenizer.

    Args:
        tokenizer: the model's; None loads that of `model_name`, a directory or a hub id.
    """

    def __init__(self, tokenizer: Any, model_name: str) -> None:
        self.tokenizer, self._model_name = tokenizer, model_name
        self._tokens: dict[str, list[int]] = {}

    def tokens(self, text: str) -> list[int]:
        """The token ids of `text`, without special tokens. Raises HeteroKVError when there is no tokenizer."""
        if text in self._tokens:
            return self._tokens[text]
        if self.tokenizer is None:
            # Imported here: the import is slow, and the command line's flags and help work without it.
            from transformers import AutoTokenizer

            try:
                self.tokenizer = AutoTokenizer.from_pretrained(self._model_name)
            except (OSError, ValueError) as error:
                raise HeteroKVError(
                    f"the eviction policy needs a tokenizer, but {self._model_name!r} has none ({error}); pass one: "
                    "HeteroCache(model, tokenizer=tokenizer)"
                ) from error
        self._tokens[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._tokens[text]
