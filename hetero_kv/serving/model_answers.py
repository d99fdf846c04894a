"""A model's defaults for answers, from its generation config: end tokens and suppressed tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hetero_kv.serving.growing_answer import GrowingAnswer
from hetero_kv.serving.sampler import Sampler
from hetero_kv.serving.sampling import SamplingParams

_logger = logging.getLogger(__name__)
# Settings of a generation config that change answers in transformers' `generate` and are not supported here, each with
# the value that, like None, has no effect.
_UNAPPLIED: dict[str, Any] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "stop_strings": [],
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


class ModelAnswers:
    """Begins answers of a model, by its present generation config.

    Args:
        model: a transformers model.
        tokenizer: the model's.

    Attributes:
        vocab_size: number of the model's logits.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if token.special}
        config = model.generation_config
        unapplied = {name: getattr(config, name, None) for name in _UNAPPLIED}
        named = [f"{name}={value}" for name, value in unapplied.items() if value not in (None, _UNAPPLIED[name])]
        if named:
            _logger.warning(
                "the model's generation config sets %s, which only model.generate applies", ", ".join(named)
            )

    @property
    def ends(self) -> frozenset[int]:
        """The model's own end-of-turn tokens."""
        return end_tokens(self._model)

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """The sampler of the tokens after a prompt. Raises HeteroKVError for an unknown token in `logit_bias`."""
        return Sampler(params, prompt, self.vocab_size, suppressed_tokens(self._model))

    def begun(
        self, params: SamplingParams, limit: int, markers: Mapping[int, str] = MappingProxyType({})
    ) -> GrowingAnswer:
        """An answer of at most `limit` tokens that has none yet; see `GrowingAnswer` for `markers`."""
        return GrowingAnswer(
            self._tokenizer,
            params,
            limit,
            ends=frozenset(params.ends) | (frozenset() if params.ignore_eos else self.ends),
            stop_tokens={self._special[text]: text for text in params.stop if text in self._special},
            markers=markers,
        )


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end an answer, from the model's generation config."""
    ends = model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def suppressed_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that the model's generation config forbids."""
    return tuple(model.generation_config.suppress_tokens or ())
