"""A conversation with a model: prefill and decode with streaming, progress, statistics, and turns that go on."""

from __future__ import annotations

import copy
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.cache_utils import Cache

from hetero_kv.chat.answer import Answer, FinishReason, Statistics
from hetero_kv.engine.cache import HeteroCache, Progress
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.engine.undo import undo_on_error, way_back
from hetero_kv.engine.untouched import forked
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.text_encoding import CHARACTERS_OF_A_TOKEN
from hetero_kv.models.turns import TurnTokens, about

# getrusage counts kilobytes, except on macOS.
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class _Said:
    """What a conversation has come to; the next turn replaces it as a whole.

    Attributes:
        tokens: of all turns.
        go_back: takes the cache to where it holds them, the last one excepted, whatever it holds beyond.
    """

    tokens: list[int]
    go_back: Callable[[], None]


class _StoppedInPrefill(Exception):
    """Raised between chunks of a prefill that the user stops."""


class Conversation:
    """Questions to a model and its answers; all turns stay stored, none is processed twice.

    Args:
        model: with rules injected it keeps its KV in a HeteroCache; untouched, in transformers' DynamicCache.
        max_seq_len: capacity in tokens; None takes the rules' setting.
        system: the system message; None for the chat template's own.
        forks: forks that are to have room for `max_seq_len` tokens too; see HeteroCache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_seq_len: int | None = None,
        system: str | None = None,
        forks: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._turns = TurnTokens(tokenizer, system)
        self.cache: Cache = self._new_cache(max_seq_len, forks)
        self._said = _Said([], self.cache.reset)
        self._is_answering = False

    def reset(self) -> None:
        """Forget the conversation."""
        self._said = _Said([], self.cache.reset)
        self._said.go_back()

    def fork(self) -> Conversation:
        """A second conversation that begins with everything said so far and goes its own way.

        Nothing is processed again, and the stored blocks are shared (HeteroCache.fork): one long document, many
        questions that know nothing of each other.

        Raises HeteroKVError in the middle of an answer.
        """
        if self._is_answering:
            raise HeteroKVError("an answer is being generated; fork the conversation before or after, not in between")
        self._said.go_back()
        twin = copy.copy(self)
        twin.cache = forked(self.cache)
        twin._said = _Said(self._said.tokens, way_back(twin.cache) if self._said.tokens else twin.cache.reset)
        return twin

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._said.tokens)

    @property
    def max_seq_len(self) -> int | None:
        """Capacity in tokens; None when the cache has no bound."""
        return self.cache.max_seq_len if isinstance(self.cache, HeteroCache) else None

    def ask(
        self,
        question: str,
        *,
        document: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
        on_progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """The model's answer to `question` after everything said before.

        Args:
            document: a text that the question is about and that goes before it, behind a blank line between them. Rules
                whose `observation` is `question` then look at what the question alone attends to.
            temperature: 0 takes the most likely token (greedy).
            top_p: share of the probability mass that is sampled from.
            seed: makes sampling repeatable.
            on_text: called with pieces of the answer as they come.
            on_progress: called after every prefilled chunk.
            should_stop: asked after every prefilled chunk and every token. A stop during prefill leaves the
                conversation as it was; a stop later keeps the part of the answer that was given.

        Raises:
            CacheFullError: the question does not fit. The conversation is as it was.
            HeteroKVError: the question is empty, or no text.

        Whatever is raised, KeyboardInterrupt at any moment included, the conversation is as it was.
        """
        if not question.strip():
            raise HeteroKVError("the question is empty; give at least one character")
        self._is_answering = True
        try:
            # What an interrupt left in the cache behind the last answer, before anything could undo it.
            self._said.go_back()
            message = question if document is None else about(document, question)
            self._require_encodable(message)
            prompt, asked = self._prompt(message, None if document is None else question)
            watch = _Watch(should_stop)
            if isinstance(self.cache, HeteroCache):
                self.cache.on_progress = watch.on_progress(on_progress)
            if seed is not None:
                torch.manual_seed(seed)
            sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
            return self._answer(
                prompt, asked, max_new_tokens, sampling if temperature else {"do_sample": False}, watch, on_text
            )
        finally:
            self._is_answering = False

    def _require_encodable(self, question: str) -> None:
        """Raise CacheFullError for a question so long that encoding it is in vain: that alone takes memory and time."""
        capacity = self.max_seq_len
        if capacity is not None and len(question) > capacity * CHARACTERS_OF_A_TOKEN:
            raise CacheFullError(
                f"the question has {len(question):,} characters, of which no more than "
                f"{capacity * CHARACTERS_OF_A_TOKEN:,} can fit: max_seq_len is {capacity}; shorten the question, or "
                "raise max_seq_len"
            )

    def _prompt(self, message: str, question: str | None) -> tuple[list[int], int | None]:
        """The tokens of the conversation up to where the answer to `message` begins, and its question's number.

        See `TurnTokens.question`.
        """
        said = self._said.tokens
        turn = self._turns.following(message, said[-1]) if said else self._turns.first(message)
        return [*said, *turn], self._turns.question(turn, message, question)

    def _answer(
        self,
        prompt: list[int],
        asked: int | None,
        max_new_tokens: int,
        sampling: dict[str, Any],
        watch: _Watch,
        on_text: Callable[[str], None] | None,
    ) -> Answer:
        limit = self._new_tokens_that_fit(len(prompt), max_new_tokens)
        stored = self.cache.get_seq_length()
        input_ids = torch.tensor([prompt], device=self.model.device)
        try:
            is_ours = isinstance(self.cache, HeteroCache)
            with self.cache.asking(asked) if is_ours else nullcontext(), undo_on_error(self.cache):
                output = self.model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    past_key_values=self.cache,
                    max_new_tokens=limit,
                    stopping_criteria=StoppingCriteriaList([watch]),
                    streamer=_Streamer(self.tokenizer, on_text) if on_text else None,
                    **sampling,
                )
        except _StoppedInPrefill:
            return Answer("", "stopped", self._statistics(watch, 0, 0, self.context_tokens))
        tokens = output[0].tolist()
        generated = tokens[len(prompt) :]
        if watch.stopped:
            reason: FinishReason = "stopped"
        elif generated[-1] in self._end_tokens():
            reason = "end"
        else:
            reason = "max_new_tokens" if limit == max_new_tokens else "full"
        text = self.tokenizer.decode(generated, skip_special_tokens=True)
        statistics = self._statistics(watch, len(prompt) - stored, len(generated), len(tokens))
        answer = Answer(text, reason, statistics)
        # Nothing is done behind this: an interrupt finds the conversation before the question, or the one after it.
        self._said = _Said(tokens, way_back(self.cache))
        return answer

    def _new_cache(self, max_seq_len: int | None, forks: int) -> Cache:
        if getattr(self.model, "hetero_kv_injection", None) is not None:
            return HeteroCache(self.model, max_seq_len, forks=forks, tokenizer=self.tokenizer)
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def _new_tokens_that_fit(self, prompt_tokens: int, wanted: int) -> int:
        capacity = self.max_seq_len
        if not isinstance(self.cache, HeteroCache) or capacity is None:
            return wanted
        if prompt_tokens > capacity:
            raise CacheFullError(
                f"the conversation would be {prompt_tokens} tokens long and max_seq_len is {capacity}; set max_seq_len "
                f"to at least {prompt_tokens + wanted}, shorten the question by {prompt_tokens - capacity} "
                "tokens, or start anew (/reset)"
            )
        stored = self.cache.get_seq_length()
        self.cache.require_room(1, prompt_tokens - stored)
        room = self.cache.room
        assert room is not None
        # The last token of an answer is not stored until the next turn.
        return min(wanted, stored + room + 1 - prompt_tokens)

    def _end_tokens(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}

    def _statistics(self, watch: _Watch, prompt_tokens: int, generated: int, context: int) -> Statistics:
        now = time.perf_counter()
        first = watch.first_token or now
        is_ours = isinstance(self.cache, HeteroCache)
        kv_bytes = self.cache.dram_bytes if is_ours else _tensor_bytes(self.cache)
        counted = self.cache.statistics if is_ours else {}
        return Statistics(
            prompt_tokens=prompt_tokens,
            context_tokens=context,
            generated_tokens=generated,
            time_to_first_token_s=first - watch.start,
            prefill_s=first - watch.start,
            decode_s=(watch.last_token or first) - first,
            peak_dram_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT,
            peak_vram_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            kv_bytes=kv_bytes,
            kv_device_bytes=self.cache.device_bytes if is_ours else 0,
            of_layers={name: layers for name, layers in counted.items() if any(v is not None for v in layers)},
        )


class _Watch(StoppingCriteria):
    """Times the tokens as they come, and stops generation when it is asked to."""

    def __init__(self, should_stop: Callable[[], bool] | None) -> None:
        self.start = time.perf_counter()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.stopped = False
        self._should_stop = should_stop or (lambda: False)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        self.stopped = self._should_stop()
        return torch.full((input_ids.shape[0],), self.stopped, dtype=torch.bool, device=input_ids.device)

    def on_progress(self, report: Progress | None) -> Progress:
        """`report`, and an exception that ends the prefill once a stop is wanted."""

        def reported(layers_done: int, layers: int, tokens_done: int, tokens: int) -> None:
            # A decode step of one token needs no report.
            if report is not None and tokens > 1:
                report(layers_done, layers, tokens_done, tokens)
            if self.first_token is None and self._should_stop():
                raise _StoppedInPrefill

        return reported


class _Streamer(TextStreamer):
    """Hands on decoded text as soon as it is certain."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def _tensor_bytes(cache: Cache) -> int:
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)
