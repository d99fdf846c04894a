"""Prompts and sampling parameters of callers, checked, as requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from typing import Any

import numpy as np

from hetero_kv.cpu_ops.token_sampling import drawn, filtered_weights
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.models.chat_template import thinking_variable
from hetero_kv.models.loading import LoadedModel
from hetero_kv.models.messages import Messages
from hetero_kv.models.tool_definitions import Tools
from hetero_kv.models.turns import TurnTokens
from hetero_kv.rules.injection import Injection
from hetero_kv.serving.attended import Replay, edges_of, require_recordable
from hetero_kv.serving.model_answers import ModelAnswers
from hetero_kv.serving.request import Request
from hetero_kv.serving.sampler import Choice
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.speculation.speculation import Speculation
from hetero_kv.serving.stream import FinishReason, ResultStream


class InputProcessor:
    """Checks what callers of an `Engine` pass, and makes the requests that its loop computes.

    Args:
        model: with rules injected.
        injection: these rules.
        max_seq_len: capacity of a request, prompt and answer, tokens.
        speculation: makes the drafters of requests.

    Attributes:
        answers: the model's vocabulary size and end tokens.
    """

    def __init__(self, model: LoadedModel, injection: Injection, max_seq_len: int, speculation: Speculation) -> None:
        # Compile the kernels that draw tokens now, so that no request waits for them.
        drawn(filtered_weights(np.zeros(2, np.float32), 1.0, 1, 0.5, 0.0), 0.0)
        self.answers = ModelAnswers(model.model, model.tokenizer)
        self._tokenizer, self._turns = model.tokenizer, TurnTokens(model.tokenizer)
        self._injection, self._max_seq_len, self._speculation = injection, max_seq_len, speculation

    def encode(
        self, messages: Messages, tools: Tools | None, thinks: bool | None, variables: Mapping[str, Any] | None
    ) -> list[int]:
        """The tokens of a conversation; see `Engine.encode`."""
        switch = {} if thinks is None else {thinking_variable(self._tokenizer): thinks}
        return self._turns.conversation(messages, tools=tools, variables={**(variables or {}), **switch})

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        stream: ResultStream[Any],
        *,
        markers: Mapping[int, str],
        answered: Sequence[int],
        speculation: str | None,
        tenant: str,
        **options: Any,
    ) -> tuple[Request, FinishReason | None]:
        """The request of a call of `Engine.generate`, and why its answer ends with `answered`; None if it goes on.

        Args:
            options: as for `Request`.

        Raises as `Engine.generate`.
        """
        for token in params.ends:
            self._require_token(token, "ends has")
        tokens = self._tokens(prompt)
        self._require_capacity(tokens)
        if speculation is not None:
            self._speculation.require(speculation)
        # The last token of an answer is not stored.
        limit = min(params.max_new_tokens, self._max_seq_len + 1 - len(tokens))
        if len(answered) > limit:
            raise HeteroKVError(f"answered has {len(answered)} tokens; give at most the answer's {limit}")
        sampler, answer = self.answers.sampler(params, tokens), self.answers.begun(params, limit, markers)
        sampler.skip(answered)
        reason = None
        for token in answered:
            reason = answer.take(Choice(token))
        new_drafter = partial(self._speculation.drafter, [*tokens, *answered], speculation, tenant)
        request = Request(
            tokens, params, sampler, answer, stream,
            new_drafter=new_drafter, answered=answered, tenant=tenant, **options,
        )  # fmt: skip
        return request, reason

    def replay(
        self,
        tokens: Sequence[int],
        position: int,
        prompt_tokens: int | None,
        bins: int | Sequence[int],
        stream: ResultStream[Any],
        **options: Any,
    ) -> Replay:
        """The request of a call of `Engine.attended`; raises as it does.

        Args:
            options: as for `Request`.
        """
        known = self._tokens(tokens)
        if not 1 <= position < len(known):
            raise HeteroKVError(f"position is {position}; it must be from 1 to {len(known) - 1}, a place in the tokens")
        if prompt_tokens is not None and not 1 <= prompt_tokens <= position:
            raise HeteroKVError(
                f"prompt_tokens is {prompt_tokens}; it must be from 1 to position, {position}, because no forward "
                "chose a token of a prompt"
            )
        prompt = max(1, position - 1) if prompt_tokens is None else prompt_tokens
        before, edges = known[:position], edges_of(bins, position)
        self._require_capacity(before)
        require_recordable(self._injection, in_prompt=prompt == position)
        params = SamplingParams(max_new_tokens=1)
        return Replay(
            before, params, self.answers.sampler(params, before), self.answers.begun(params, 1), stream,
            prompt=prompt, edges=edges, **options,
        )  # fmt: skip

    def _require_capacity(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self._max_seq_len:
            raise CacheFullError(
                f"the prompt has {len(tokens)} tokens, and max_seq_len is {self._max_seq_len}; shorten the prompt by "
                f"{len(tokens) - self._max_seq_len} tokens, or set max_seq_len to at least {len(tokens)}"
            )

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokens = self._turns.raw(prompt)
        else:
            try:
                tokens = [index(token) for token in prompt]
            except TypeError:
                raise HeteroKVError(
                    f"the prompt is {shown(prompt, 80)}; give a text, or one list of token ids"
                ) from None
            for token in {min(tokens, default=0), max(tokens, default=0)}:
                self._require_token(token, "the prompt has")
        if not tokens:
            raise HeteroKVError("the prompt is empty; give at least one token")
        return tokens

    def _require_token(self, token: int, where: str) -> None:
        if not 0 <= token < self.answers.vocab_size:
            raise HeteroKVError(f"{where} token {token}; the model has tokens 0 to {self.answers.vocab_size - 1}")
