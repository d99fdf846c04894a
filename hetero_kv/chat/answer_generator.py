"""Generates an answer after the tokens of a conversation's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from hetero_kv.chat.answer_text import AnswerText
from hetero_kv.chat.generation_monitor import GenerationMonitor
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.rollback import CacheTransaction, rollback_on_error
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.answers import AnswerForm
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.model_answers import ModelAnswers
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.speculation.drafter import DraftCounts
from hetero_kv.serving.speculation.opening import Guessing, open_speculation
from hetero_kv.serving.stream import FinishReason


class GeneratedAnswer(NamedTuple):
    """An answer's tokens, why it ended, and how many tokens were drafted for it."""

    tokens: list[int]
    finish_reason: FinishReason
    drafts: DraftCounts


class AnswerGenerator:
    """Generates answers of a model, under rules or untouched.

    Args:
        model: a transformers model.
        tokenizer: the model's.
        speculation: how the next tokens are guessed, as for `Engine`.
        max_seq_len: capacity of each sequence, tokens; None takes the rules' setting.
        sequences: how many there may be at a time.

    Raises as `open_speculation`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, speculation: Guessing, *, max_seq_len: int | None = None, sequences: int = 1
    ) -> None:  # fmt: skip
        self._form, self._answers = AnswerForm(tokenizer), ModelAnswers(model, tokenizer)
        self._forward = ModelForward(model)
        self._speculation = open_speculation(
            self._forward, tokenizer, speculation, max_seq_len=max_seq_len, sequences=sequences
        )

    def generate(
        self, cache: Cache, prompt: Sequence[int], question_tokens: int | None, sampling: SamplingParams, limit: int,
        watch: GenerationMonitor, written: AnswerText,
    ) -> GeneratedAnswer:  # fmt: skip
        """Generate the answer to a prompt whose prefix is in the cache. Its last token is not stored.

        Args:
            question_tokens: how many of the prompt's last tokens are its question; None if unknown.
            limit: the longest answer that fits, tokens.
            watch: is notified of every chunk and token, and may end the answer.
            written: takes the answer's text.

        Raises StoppedInPrefill if the user stops the prefill. After any exception the cache is as it was.
        """
        parser, sampler = self._form.parser(prompt), self._answers.sampler(sampling, prompt)
        answer = self._answers.begun(sampling, limit, parser.markers)
        with CacheTransaction(cache) if isinstance(cache, HeteroCache) else rollback_on_error(cache):
            logits = self._prefilled(cache, prompt[cache.get_seq_length() :], question_tokens, watch)
            source = AnswerTokens(self._forward, cache, sampler, prompt, logits, self._speculation, limit=limit)
            with source as tokens:
                for choice in tokens:
                    reason = answer.take(choice)
                    written.add(parser.add(answer.pieces[-1]))
                    is_stopped = watch.count()
                    if reason is not None or is_stopped:
                        break
            reason = answer.complete(reason or "stopped")
            written.add(parser.end(answer.text + (answer.written_stop or "")))
        return GeneratedAnswer([piece.token for piece in answer.pieces], reason, tokens.counts)

    def _prefilled(
        self, cache: Cache, tokens: Sequence[int], question_tokens: int | None, watch: GenerationMonitor
    ) -> torch.Tensor:
        """The logits [vocab] after a turn's tokens."""
        if not isinstance(cache, HeteroCache):
            return self._forward.prompt(cache, tokens)
        cache.on_progress = watch.progress
        try:
            return self._forward.prompt(cache, tokens, question_tokens)
        finally:
            cache.on_progress = None
