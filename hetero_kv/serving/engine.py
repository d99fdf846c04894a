"""The engine: answers many requests to one model at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Self

import numpy as np

from hetero_kv.contexts.folder import contexts_at, gigabytes
from hetero_kv.cpu_ops.token_sampling import drawn, filtered_weights
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.models.chat_template import thinking_variable
from hetero_kv.models.loading import LoadedModel
from hetero_kv.models.messages import Messages
from hetero_kv.models.tool_definitions import Tools
from hetero_kv.models.turns import TurnTokens
from hetero_kv.serving.admission import Admission
from hetero_kv.serving.attended import Attended, Replay, edges_of, require_recordable
from hetero_kv.serving.checkpoints import Checkpoints
from hetero_kv.serving.engine_loop import EngineLoop
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.memory import Memory
from hetero_kv.serving.model_answers import ModelAnswers
from hetero_kv.serving.part_size import PartSize
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.queues import Queues
from hetero_kv.serving.request import Request
from hetero_kv.serving.sampler import Choice
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.scheduler import Scheduler
from hetero_kv.serving.speculation.opening import Guessing, open_speculation
from hetero_kv.serving.status import EngineStatus, SequenceStatus, State
from hetero_kv.serving.stored_prefixes import StoredPrefixes
from hetero_kv.serving.stream import ResultStream, Stream
from hetero_kv.serving.swapped import SwapFolder
from hetero_kv.serving.turns import Turn

_logger = logging.getLogger(__name__)


class Engine:
    """Answers requests from any number of threads and event loops; one thread of its own computes.

    Engines of one process, also of models that share their weights (`hetero_kv.with_rules`), compute in turn.

    All requests share one store of keys and values. A prompt that begins as an earlier one does computes the rest
    alone. Requests that are answered at the same time share every reading of the weights.

    A request is admitted with memory for its prompt and the next tokens. Where memory runs out later, or a more urgent
    request waits for it, the least urgent one waits on the disk, and goes on with the same tokens. It waits in a
    private folder `hetero-kv-…` where TMPDIR says, which only a killed process leaves behind. Where the disk is full,
    requests wait in memory, and one fails if none can go on. Engines whose cache layers cannot be saved admit a request
    with memory for its longest answer.

    Under sparse prefill and fixed memory, where RoPE frequencies follow from a prompt's length (`dynamic`, `longrope`),
    and while others' hooks are in the model, prompts pass whole, whatever `longest_gap_s` and `part` are, because parts
    would be computed otherwise. No sequence is kept where a later prompt is not computed exactly. A prompt that repeats
    an earlier answer goes on from the answer's keys and values as they were decoded, as a conversation does; under
    sparse recipes a prefill of the same text gives other ones.

    Args:
        model: with rules injected: the result of `hetero_kv.load_model(name, config=...)`.
        max_seq_len: capacity of a request, prompt and answer, tokens; None takes the rules' setting.
        max_batch: the most requests that are answered at a time; others wait.
        kv_tokens: tokens of all requests together, ended ones that are kept included; None takes what `max_batch`
            requests need, or as many as fit into memory.
        kept_prefixes: ended requests whose sequences are kept for prompts that begin alike, where there is memory.
        checkpoint_gb: GB of memory, beside `kv_tokens`, for copies of recurrent states and sliding windows. Where a
            prompt departs from an earlier one, such layers go on from the last copy before. The least recently used
            copies are dropped first. 0 takes none: then only prompts that begin with all of an earlier sequence share
            it. Models whose layers keep every token need no copies.
        context_folder: a folder to which these sequences go as saved contexts, so that prompts find them when they have
            left memory, and after a restart. They are written once no request has been there for a second; one that
            must leave memory before holds up all others for as long as the disk takes to write it, and `close` writes
            what is left. Files that cannot be written or used are logged. Or an address for fsspec that machines
            share, such as "s3://bucket/contexts": contexts are uploaded behind the answers, and what a prompt needs is
            fetched while it waits. None for no such folder.
        context_cache_gb: GB that all contexts in the folder may take; the least recently used are removed first. None
            for no limit.
        context_local_gb: GB of this machine's disk in front of an address; the least recently used files go first. None
            for no limit.
        context_wait_s: the longest wait for an address, seconds. A prompt whose stored beginning does not come in time
            is computed.
        contexts_per_tenant: how many contexts of this model a tenant may have in the folder; its least recently used
            ones go. None for no limit.
        longest_gap_s: a target for the time between two tokens of a request while another's prompt passes, seconds.
        part: tokens of a prompt that pass at once while nobody waits for a token.
        speculation: how the next tokens are guessed, several of which are then verified in one forward: `lookup` finds
            what followed the same words earlier in the conversation; the name or path of a model, or a loaded one with
            rules, guesses by that draft model; `off` decodes one token at a time; `auto` is lookup where the model and
            its rules can verify guesses (`speculation`). Answers are the same.
        starts_thread: whether a thread of the engine computes. Otherwise reading a stream does, or `step`.

    Attributes:
        tokenizer: the model's.

    Raises HeteroKVError when the model has no rules, or the draft model does not fit it, and OutOfMemoryError when
    `max_seq_len` does not fit.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_seq_len: int | None = None,
        max_batch: int = 8,
        kv_tokens: int | None = None,
        kept_prefixes: int = 16,
        checkpoint_gb: float = 1.0,
        context_folder: str | Path | None = None,
        context_cache_gb: float | None = None,
        context_local_gb: float | None = 20.0,
        context_wait_s: float = 10.0,
        contexts_per_tenant: int | None = None,
        longest_gap_s: float = 0.25,
        part: int = 2048,
        speculation: Guessing = "auto",
        starts_thread: bool = True,
    ) -> None:
        injection = getattr(model.model, "hetero_kv_injection", None)
        if injection is None:
            raise HeteroKVError(
                f"Engine: {model.name} has no rules injected; load it by hetero_kv.load_model(name, config='adaptive')"
            )
        if not checkpoint_gb >= 0:
            raise HeteroKVError(f"Engine: checkpoint_gb is {checkpoint_gb}; it must be at least 0")
        if context_cache_gb is not None and not context_cache_gb >= 0:
            raise HeteroKVError(f"Engine: context_cache_gb is {context_cache_gb}; it must be at least 0, or None")
        least = {"max_batch": (max_batch, 1), "part": (part, 1), "kept_prefixes": (kept_prefixes, 0)}
        given = (
            ("max_seq_len", max_seq_len), ("kv_tokens", kv_tokens), ("contexts_per_tenant", contexts_per_tenant),
        )  # fmt: skip
        least |= {name: (value, 1) for name, value in given if value is not None}
        for name, (value, smallest) in least.items():
            if value < smallest:
                raise HeteroKVError(f"Engine: {name} is {value}; it must be at least {smallest}")
        if context_local_gb is not None and not context_local_gb >= 0:
            raise HeteroKVError(f"Engine: context_local_gb is {context_local_gb}; it must be at least 0, or None")
        if not context_wait_s > 0:
            raise HeteroKVError(f"Engine: context_wait_s is {context_wait_s}; it must be more than 0")
        if not longest_gap_s > 0:
            raise HeteroKVError(f"Engine: longest_gap_s is {longest_gap_s}; it must be more than 0")
        # No request waits for the kernels that draw tokens.
        drawn(filtered_weights(np.zeros(2, np.float32), 1.0, 1, 0.5, 0.0), 0.0)
        self.tokenizer = model.tokenizer
        self._turns = TurnTokens(model.tokenizer)
        forward = ModelForward(model.model, model.tokenizer)
        self._speculation = open_speculation(
            forward, model.tokenizer, speculation, max_seq_len=max_seq_len, sequences=max_batch,
            longest_gap_s=longest_gap_s,
        )  # fmt: skip
        self._store = injection.common_store(max_seq_len, max_batch, kv_tokens)
        operators = list(injection.attention_operators())
        layers = injection.cache_layers()
        splits = (
            all(each.prefills_exactly for each in operators)
            and not any(getattr(layer, "is_strided", False) for layer in layers)
            and not forward.longest_rotates_all
        )
        self._injection = injection
        self._prefixes = ResidentPrefixes([] if forward.longest_rotates_all else operators, kept_prefixes)
        if context_folder is not None:
            empty = forward.new_cache(self._store)
            if self._prefixes.can_share(empty):
                contexts = contexts_at(
                    context_folder, gigabytes(context_cache_gb), gigabytes(context_local_gb), context_wait_s
                )
                self._prefixes.stored = StoredPrefixes(contexts, empty, self._store, contexts_per_tenant)
            else:
                _logger.warning(
                    "context_folder %s is not used: under these rules a prompt behind a stored beginning is not "
                    "computed exactly as a whole one",
                    context_folder,
                )
        self._swaps = SwapFolder(injection)
        self._queues = Queues()
        memory = Memory(self._store, self._prefixes, self._swaps)
        empty = forward.new_cache(self._store)
        self._goes_back, self._bytes_per_token = empty.is_croppable, injection.bytes_per_token()
        checkpoints = Checkpoints(round(checkpoint_gb * 1e9) if self._prefixes.can_share(empty) else 0, empty)
        admission = Admission(
            self._queues, memory, self._swaps, self._prefixes, lambda: forward.new_cache(self._store), checkpoints,
            max_batch,
        )  # fmt: skip
        self._max_batch = max_batch
        size = PartSize(longest_gap_s, part)
        turn = Turn(longest_gap_s)
        self._scheduler = Scheduler(
            forward, self._queues, admission, self._prefixes, checkpoints, size, turn, self._speculation,
            splits_prompts=splits,
        )  # fmt: skip
        self._answers = ModelAnswers(model.model, model.tokenizer)
        self._loop = EngineLoop(
            self._scheduler, self._queues, self._prefixes, self._swaps, turn, starts_thread=starts_thread
        )

    # -- requests

    @property
    def vocab_size(self) -> int:
        """Number of the model's logits."""
        return self._answers.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Capacity of a request, prompt and answer, tokens."""
        return self._store.capacity

    @property
    def speculation(self) -> str:
        """How tokens are guessed where a request does not say; `off` where the model or its rules cannot verify any."""
        return self._speculation.in_effect()

    def status(self) -> EngineStatus:
        """What the engine is doing now. Any thread may call it, also while a step computes."""
        store = self._store
        free = min((each.free_blocks * each.block_size for each in list(store.allocators.values())), default=None)
        capacity = store.tokens or store.capacity
        step_s, row_s = self._speculation.costs.line(self._max_batch)
        return EngineStatus(
            tuple(request.status(state) for state, request in self._requests()),
            kept_prefixes=self._prefixes.kept,
            capacity=capacity,
            free=capacity if free is None else min(free, capacity),
            dram_bytes=store.dram_bytes + self._speculation.dram_bytes,
            idle_s=time.monotonic() - self._scheduler.active_at,
            is_open=self._loop.is_open,
            max_batch=self._max_batch,
            prefill_tokens_per_s=self._scheduler.prefill_tokens_per_s,
            decode_step_s=step_s,
            decode_row_s=row_s,
            bytes_per_token=self._bytes_per_token,
            context_failures=0 if self._prefixes.stored is None else self._prefixes.stored.failures,
        )

    def sequences(self) -> list[SequenceStatus]:
        """What later prompts can take over, now or once the requests are computed; the most recently used first.

        Nothing where a prompt behind a known beginning is not computed exactly. Any thread may call it.
        """
        if not self._prefixes.are_shared:
            return []
        requests = [request.sequence(state, self._goes_back) for state, request in self._requests()]
        return requests + self._prefixes.sequences(self._goes_back)

    def _requests(self) -> list[tuple[State, Request]]:
        """All requests, each with what it waits for. Any thread may call it."""
        queues = self._queues
        passing = queues.prefilling
        known: list[tuple[State, Request]] = [("answering", each) for each in list(queues.running)]
        known += [] if passing is None else [("prefilling", passing)]
        return known + [("waiting", each) for each in (*list(queues.waiting), *self._loop.new)]

    def encode(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        thinks: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, in the model's chat template, up to the start of the next answer.

        `engine.generate(engine.encode([{"role": "user", "content": "…"}]))` asks for that answer. Control tokens come
        from the template alone: `<|im_end|>` in a message, a tool's result or a tool's description is plain text.

        Args:
            messages: in the form of OpenAI's API, see `hetero_kv.models.messages.read_messages`: each with "role" and
                "content", a text; an assistant's also with "tool_calls" and "reasoning_content".
            tools: functions that the model may call, in the form of OpenAI's API.
            thinks: whether a reasoning model thinks before it answers; None for the template's default.
            variables: values for other variables of the template, such as {"reasoning_effort": "high"}.

        Raises HeteroKVError as `hetero_kv.models.turns.TurnTokens`.
        """
        switch = {} if thinks is None else {thinking_variable(self.tokenizer): thinks}
        return self._turns.conversation(messages, tools=tools, variables={**(variables or {}), **switch})

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        question: int | None = None,
        priority: int = 0,
        markers: Mapping[int, str] | None = None,
        reuses: bool = True,
        speculation: str | None = None,
        tenant: str = "",
        answered: Sequence[int] = (),
    ) -> Stream:
        """Ask for the continuation of a prompt.

        Args:
            prompt: a text, whose control tokens are plain text, or token ids.
            sampling: how tokens are chosen; None takes the likeliest ones.
            question: how many of the prompt's last tokens are a question about the others, for rules whose
                `observation` is `question`; None if unknown.
            priority: requests of a smaller number are admitted before others that wait, and preempt those that run.
            markers: ids of control tokens and their texts, which pieces give apart from text, as
                `hetero_kv.serving.answers.AnswerParser` has them.
            reuses: whether a beginning that was computed before is taken over; otherwise all of the prompt is computed.
            speculation: how its tokens are guessed: `off`, `lookup`, `auto`, or the name of the engine's draft model;
                None takes the engine's.
            tenant: whose request it is. A beginning is taken over only from requests of the same tenant, in memory and
                on the disk; "" is a tenant too.
            answered: the first tokens of the answer, which another engine chose with the same `sampling`; its random
                numbers, penalties and grammar go on behind them. The stream has the tokens that follow, and the
                completion has all.

        Returns the stream of its tokens.

        Raises:
            CacheFullError: the prompt does not fit into `max_seq_len`.
            HeteroKVError: the prompt is empty or has tokens that the model has not, there is no such `speculation`,
                `answered` has more tokens than the answer may have, or the engine is closed.
        """
        params = sampling or SamplingParams()
        for token in params.ends:
            self._require_token(token, "ends has")
        tokens = self._tokens(prompt)
        self._require_room(tokens)
        if speculation is not None:
            self._speculation.require(speculation)
        # The last token of an answer is not stored.
        limit = min(params.max_new_tokens, self.max_seq_len + 1 - len(tokens))
        if len(answered) > limit:
            raise HeteroKVError(f"answered has {len(answered)} tokens; give at most the answer's {limit}")
        sampler, answer = self._answers.sampler(params, tokens), self._answers.begun(params, limit, markers or {})
        sampler.skip(answered)
        reason = None
        for token in answered:
            reason = answer.take(Choice(token))
        request = Request(
            tokens,
            params,
            sampler,
            answer,
            self._loop.new_stream(),
            question=question,
            priority=priority,
            reuses=reuses,
            tenant=tenant,
            new_drafter=partial(self._speculation.drafter, [*tokens, *answered], speculation, tenant),
            answered=answered,
        )
        if reason is not None:
            request.complete(reason)
            return request.stream
        return self._loop.submit(request)

    def attended(
        self,
        tokens: Sequence[int],
        position: int,
        *,
        prompt_tokens: int | None = None,
        bins: int | Sequence[int] = 256,
        priority: int = 0,
        tenant: str = "",
    ) -> ResultStream[Attended]:
        """Ask what the forward that chose a token of an answer attended to.

        That forward is computed again, in blocks that a request has left or has now. If there are none, all tokens
        before it pass again. Numbers are those of the answer where blocks come from the request that gave it; after a
        new prefill, they are so with `prompt_tokens`, to rounding.

        Args:
            tokens: a prompt and its answer, at least up to the token. Later ones are not read.
            position: the token's place in `tokens`, at least 1.
            prompt_tokens: how many of the tokens passed as a prompt, so that the first token of an answer is
                `tokens[prompt_tokens]`; that one was chosen by the prompt's exact attention. If None, all tokens but
                the last before `position` pass as a prompt where they must pass again.
            bins: how many runs of neighbouring tokens get a number, at most; or the first token of each run.
            priority, tenant: as of `generate`.

        Returns the stream, without pieces, whose result is an `Attended`. Cancelled, it raises HeteroKVError.

        Raises:
            CacheFullError: the tokens do not fit into `max_seq_len`.
            HeteroKVError: the attention of a layer cannot be recorded, which is named, an argument is outside of its
                range, or the engine is closed.
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
        self._require_room(before)
        require_recordable(self._injection, in_prompt=prompt == position)
        params = SamplingParams(max_new_tokens=1)
        return self._loop.submit(
            Replay(
                before, params, self._answers.sampler(params, before), self._answers.begun(params, 1),
                self._loop.new_stream(), prompt=prompt, edges=edges, priority=priority, tenant=tenant,
            )
        )  # fmt: skip

    def _require_room(self, tokens: Sequence[int]) -> None:
        capacity = self.max_seq_len
        if len(tokens) > capacity:
            raise CacheFullError(
                f"the prompt has {len(tokens)} tokens, and max_seq_len is {capacity}; shorten the prompt by "
                f"{len(tokens) - capacity} tokens, or set max_seq_len to at least {len(tokens)}"
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

    def _require_token(self, token: int, whose: str) -> None:
        if not 0 <= token < self.vocab_size:
            raise HeteroKVError(f"{whose} token {token}; the model has tokens 0 to {self.vocab_size - 1}")

    @property
    def ends(self) -> frozenset[int]:
        """The model's own end-of-turn tokens at this moment."""
        return self._answers.ends

    # -- computing

    def step(self) -> bool:
        """Compute one step: a part of a prompt, and a token of every request that has its prompt behind it.

        Without requests, a kept sequence is written to `context_folder`. Ctrl-C ends the wait for a step, and not the
        step. Returns whether there was anything to compute.
        """
        return self._loop.step()

    def save_kept(self) -> None:
        """Write the sequences of ended requests to `context_folder` now, so that other engines find them there.

        Requests wait for the disk meanwhile. A failure is logged.
        """
        self._loop.save_kept()

    def close(self) -> None:
        """End all requests as cancelled, and the engine's thread; free all blocks. Further calls do nothing."""
        self._loop.close()
        self._speculation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
