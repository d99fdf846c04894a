"""A conversation with a model: prefill and decode with streaming, progress, statistics, and further turns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hetero_kv.chat.answer import ChatAnswer, Turn
from hetero_kv.chat.answer_generator import AnswerGenerator
from hetero_kv.chat.answer_text import AnswerText
from hetero_kv.chat.fitting import new_tokens_that_fit, require_encodable
from hetero_kv.chat.generation_monitor import GenerationMonitor, StoppedInPrefill, turn_statistics
from hetero_kv.chat.saved_conversation import ConversationState, SavedConversation
from hetero_kv.contexts.prefix_cache import PrefixCache
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.hf_cache_layers import forked
from hetero_kv.engine.prefill_progress import Progress
from hetero_kv.engine.rollback import rollback_point
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.loading import LoadedModel
from hetero_kv.models.turns import TurnTokens, about
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.speculation.opening import Guessing

#: Turns that can be undone. Each may keep data that the next turn replaces: bounded entries, low-rank factors.
MOST_UNDONE = 4


class Conversation(SavedConversation):
    """Questions to a model and its answers; all turns stay stored, and none is processed twice.

    Args:
        model: with injected rules its KV is in a HeteroCache, otherwise in transformers' DynamicCache. The result of
            `load_model` includes the tokenizer.
        tokenizer: the model's tokenizer; None for the one in `model`.
        max_seq_len: capacity in tokens; None takes the rules' setting.
        system: the system message; None for the chat template's own.
        thinks: whether a reasoning model thinks before it answers; None leaves it to its chat template.
        forks: the number of forks that each need room for `max_seq_len` tokens too; see HeteroCache.
        prefix_cache: stores the contexts of answers, and may have a prefix of the first prompt.
        speculation: how the next tokens are guessed, as for `Engine`. Answers are the same.

    Raises HeteroKVError without a tokenizer, and as `Engine` for a `speculation` that there is not.
    """

    def __init__(
        self,
        model: PreTrainedModel | LoadedModel,
        tokenizer: Any = None,
        *,
        max_seq_len: int | None = None,
        system: str | None = None,
        thinks: bool | None = None,
        forks: int = 0,
        prefix_cache: PrefixCache | None = None,
        speculation: Guessing = "auto",
    ) -> None:
        if isinstance(model, LoadedModel):
            model, tokenizer = model.model, model.tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise HeteroKVError(
                f"Conversation: tokenizer is missing, and {type(model).__name__} includes none; give the model's "
                "tokenizer, or the result of hetero_kv.load_model"
            )
        self.model = model
        self.tokenizer = tokenizer
        self._prefix_cache = prefix_cache
        self._capacity: dict[str, Any] = {"max_seq_len": max_seq_len, "forks": forks}
        self.system, self._thinks = system, thinks
        self._turns = TurnTokens(tokenizer, system, thinks)
        self._generator = AnswerGenerator(model, tokenizer, speculation, max_seq_len=max_seq_len, sequences=1 + forks)
        self.cache: Cache = self._new_cache(max_seq_len, forks)
        self._state = ConversationState([], self.cache.reset)
        self._is_answering = False

    def reset(self) -> None:
        """Forget the conversation."""
        self._state = ConversationState([], self.cache.reset)
        self._state.go_back()

    def restart(self, system: str | None) -> None:
        """Forget the conversation, and set another system message; None for the chat template's own.

        Raises HeteroKVError if the model's chat template takes none. The conversation is unchanged then.
        """
        turns = TurnTokens(self.tokenizer, system, self._thinks)
        turns.first("?")
        self.reset()
        self._turns, self.system = turns, system

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The sizes of all turns so far."""
        return self._state.turns

    @property
    def can_undo(self) -> bool:
        """Whether the last turn can be undone: at most `MOST_UNDONE` in a row, and not before the first turn."""
        return bool(self._state.earlier)

    def undo(self) -> None:
        """Remove the last question and its answer from the conversation and its cache.

        Raises HeteroKVError if no turn can be undone (`can_undo`).
        """
        if self._is_answering:
            raise HeteroKVError("an answer is being generated; take the question back when it is complete, or stop it")
        if not self._state.earlier:
            raise HeteroKVError(
                "there is no question to take back: the conversation is empty"
                if not self._state.turns
                else "the question before cannot be taken back: its state is not kept; /reset forgets all questions"
            )
        *earlier, before = self._state.earlier
        self._state = replace(before, earlier=tuple(earlier))
        self._state.go_back()

    def fork(self) -> Conversation:
        """A second conversation that begins with all turns so far and continues independently.

        Nothing is processed again, and both share the stored blocks (HeteroCache.fork): one long document can get many
        independent questions.

        Raises HeteroKVError in the middle of an answer.
        """
        self._require_idle("fork")
        self._state.go_back()
        fork = copy.copy(self)
        fork.cache = forked(self.cache)
        go_back = rollback_point(fork.cache) if self._state.tokens else fork.cache.reset
        fork._state = ConversationState(self._state.tokens, go_back, self._state.turns)
        return fork

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._state.tokens)

    def text_tokens(self, text: str) -> int:
        """The number of tokens of a text alone."""
        return len(self._turns.text(text))

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
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
        on_thought: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
        on_progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> ChatAnswer:
        """The model's answer to `question`, after all earlier turns.

        Args:
            document: a text that goes before the question, with a blank line between them. Rules whose `observation` is
                `question` use the attention of the question alone.
            max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty,
                logit_bias, seed: as in `hetero_kv.SamplingParams`.
            stop: non-empty texts; the first that appears ends the answer and is its last text.
            on_text: called with pieces of the answer as they come.
            on_thought: called with the pieces of thoughts, which `on_text` does not get then.
            on_token: called after every token with the number of tokens so far.
            on_progress: called after every prefilled chunk.
            should_stop: called after every prefilled chunk and every token. A stop during prefill leaves the
                conversation unchanged; a later stop keeps the part of the answer that exists.

        Raises:
            CacheFullError: the question does not fit. The conversation is unchanged.
            ConfigError: a value is outside its range.
            HeteroKVError: the question is empty, or not text.

        After any exception, including KeyboardInterrupt at any moment, the conversation is unchanged.
        """
        if not question.strip():
            raise HeteroKVError("the question is empty; give at least one character")
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias or {},
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=seed,
        )
        self._is_answering = True
        try:
            # An interrupt may have left tokens in the cache after the last answer: remove them.
            self._state.go_back()
            message = question if document is None else about(document, question)
            if isinstance(self.cache, HeteroCache):
                require_encodable(self.cache, message, self.model.hetero_kv_injection.context_length)
            prompt, question_tokens = self._prompt(message, None if document is None else question)
            self._begin_from_stored(prompt)
            watch = GenerationMonitor(should_stop, on_token, on_progress)
            answer = self._answer(prompt, question_tokens, sampling, watch, AnswerText(on_text, on_thought))
            self._keep()
            return answer
        finally:
            self._is_answering = False

    def _prompt(self, message: str, question: str | None) -> tuple[list[int], int | None]:
        """The conversation's tokens up to the start of the answer to `message`, and the question's number of tokens.

        See `TurnTokens.question`.
        """
        state = self._state.tokens
        turn = self._turns.following(message, state[-1]) if state else self._turns.first(message)
        return [*state, *turn], self._turns.question(turn, message, question)

    def _answer(
        self,
        prompt: list[int],
        question_tokens: int | None,
        sampling: SamplingParams,
        watch: GenerationMonitor,
        written: AnswerText,
    ) -> ChatAnswer:
        cache, device, limit = self.cache, self.model.device, sampling.max_new_tokens
        if isinstance(cache, HeteroCache):
            limit = new_tokens_that_fit(cache, len(prompt), limit, self.model.hetero_kv_injection.context_length)
        stored = cache.get_seq_length()
        try:
            generated = self._generator.generate(cache, prompt, question_tokens, sampling, limit, watch, written)
        except StoppedInPrefill:
            return ChatAnswer("", "stopped", turn_statistics(cache, device, watch, 0, self.context_tokens))
        tokens = [*prompt, *generated.tokens]
        statistics = turn_statistics(cache, device, watch, len(prompt) - stored, len(tokens), generated.drafts)
        answer = ChatAnswer(written.text, generated.finish_reason, statistics, written.reasoning, written.content)
        state = self._state
        turn = Turn(len(prompt) - len(state.tokens), len(generated.tokens))
        # An untouched model's cache is copied as it grows, so every earlier state would be a second copy.
        most = MOST_UNDONE if isinstance(cache, HeteroCache) else 1
        earlier = (*state.earlier, replace(state, earlier=()))[-most:]
        # This assignment comes last: an interrupt finds the conversation before the question, or after the answer.
        self._state = ConversationState(tokens, rollback_point(cache), (*state.turns, turn), earlier)
        return answer

    def _new_cache(self, max_seq_len: int | None, forks: int) -> Cache:
        if getattr(self.model, "hetero_kv_injection", None) is not None:
            return HeteroCache(self.model, max_seq_len, forks=forks, tokenizer=self.tokenizer)
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))
