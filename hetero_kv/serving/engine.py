"""The engine: answers many requests to one model at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hetero_kv.contexts.folder import contexts_at
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.loading import LoadedModel
from hetero_kv.models.messages import Messages
from hetero_kv.models.tool_definitions import Tools
from hetero_kv.serving.admission import Admission
from hetero_kv.serving.answer_pace import AnswerPace
from hetero_kv.serving.attended import Attended
from hetero_kv.serving.checkpoints import Checkpoints
from hetero_kv.serving.engine_loop import EngineLoop
from hetero_kv.serving.engine_report import EngineReport
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.input_processor import InputProcessor
from hetero_kv.serving.memory import Memory
from hetero_kv.serving.output_processor import OutputProcessor
from hetero_kv.serving.part_size import PartSize
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.prompt_order import PromptOrder
from hetero_kv.serving.prompt_speed import PromptSpeed
from hetero_kv.serving.queues import Queues
from hetero_kv.serving.row_decoder import RowDecoder
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.scheduler import Scheduler
from hetero_kv.serving.speculation.opening import Guessing, open_speculation
from hetero_kv.serving.status import EngineStatus, SequenceStatus
from hetero_kv.serving.stored_prefixes import StoredPrefixes
from hetero_kv.serving.stream import ResultStream, Stream
from hetero_kv.serving.swapped import SwapFolder
from hetero_kv.serving.turns import EngineTurn

_logger = logging.getLogger(__name__)


class Engine:
    """Answers requests from any number of threads and event loops; one thread of the engine computes.

    Engines of one process, also of models that share their weights (`hetero_kv.with_rules`), compute in turn.

    All requests share one store of keys and values. A prompt that shares a prefix with an earlier one computes only the
    rest. Requests that are answered at the same time share every reading of the weights.

    Short prompts, and prompts whose prefix is known, overtake long ones (`serving.prompt_order`).

    A request is admitted with memory for its prompt and the next tokens. If memory runs out later, or a more urgent
    request needs it, the least urgent request waits on the disk, and later continues with the same tokens. Its file is
    in a private folder `hetero-kv-…` in TMPDIR, which outlives the process only if that is killed. If the disk is full,
    requests wait in memory, and one fails if none can continue. Engines whose cache layers cannot be saved admit a
    request with memory for its longest answer.

    In some cases prompts are computed whole, whatever `longest_gap_s` and `part` are, because parts would give other
    results: under sparse prefill and fixed memory, with RoPE frequencies that depend on a prompt's length (`dynamic`,
    `longrope`), and while foreign hooks are in the model. Sequences are kept only if a later prompt that reuses them is
    computed exactly. A prompt that repeats an earlier answer reuses the answer's keys and values as they were decoded,
    as a conversation does; under sparse recipes a prefill of the same text gives other ones.

    Args:
        model: with rules injected: the result of `hetero_kv.load_model(name, config=...)`.
        max_seq_len: capacity of a request, prompt and answer, tokens; None takes the rules' setting.
        max_batch: the largest number of requests that are answered at a time; others wait.
        kv_tokens: capacity of all requests together, including ended ones that are kept, tokens; None takes what
            `max_batch` requests need, or as many as fit into memory.
        kept_prefixes: number of ended requests whose sequences are kept for later prompts with the same prefix, memory
            permitting.
        checkpoint_gb: GB of memory, in addition to `kv_tokens`, for copies of recurrent states and sliding windows. If
            a prompt diverges from an earlier one, such layers continue from the last copy before that token. The least
            recently used copies are dropped first. With 0 no copies are taken, and an earlier sequence is reused only
            by prompts that begin with all of it. Models whose layers keep every token need no copies.
        context_folder: a folder to which these sequences are saved as contexts, so that prompts find them after they
            have left memory, and after a restart. They are written when no request has arrived for a second; if one
            must leave memory earlier, all requests wait until it is written. `close` writes the rest. Files that cannot
            be written or used are logged. Or an fsspec address that machines share, such as "s3://bucket/contexts":
            contexts are uploaded in the background, and a prompt waits while the ones that it needs are fetched. None
            for no such folder.
        context_cache_gb: GB that all contexts in the folder may take; the least recently used are removed first. None
            for no limit.
        context_local_gb: GB of this machine's disk that cache an address; the least recently used files are removed
            first. None for no limit.
        context_wait_s: the longest wait for an address, seconds. If a prompt's stored prefix does not arrive in time,
            the prompt is computed.
        contexts_per_tenant: how many contexts of this model a tenant may have in the folder; its least recently used
            ones are removed. None for no limit.
        longest_gap_s: a target for the time between two tokens of a request during another request's prefill, seconds.
        part: tokens of a prompt that are computed at once while no request waits for a token.
        speculation: how several next tokens are guessed, to be verified in one forward: `lookup` finds what followed
            the same words earlier in the conversation; `sparse` guesses by the model itself, with attention to few
            blocks; the name or path of a model, or a loaded one with rules, guesses by that draft model; `off` decodes
            one token at a time; `auto` is `lookup` if the model and its rules can verify guesses (`speculation`).
            Answers are the same.
        starts_thread: whether a thread of the engine computes. Otherwise reading a stream computes, or `step`.

    Attributes:
        tokenizer: the model's.
        vocab_size: number of its logits.
        max_seq_len: capacity of a request, prompt and answer, tokens.

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
        for name, value, least in (
            ("max_seq_len", max_seq_len, 1), ("max_batch", max_batch, 1), ("kv_tokens", kv_tokens, 1),
            ("kept_prefixes", kept_prefixes, 0), ("checkpoint_gb", checkpoint_gb, 0),
            ("context_cache_gb", context_cache_gb, 0), ("context_local_gb", context_local_gb, 0),
            ("contexts_per_tenant", contexts_per_tenant, 1), ("part", part, 1),
        ):  # fmt: skip
            if value is not None and not value >= least:
                raise HeteroKVError(f"Engine: {name} is {value}; it must be at least {least}")
        for name, seconds in (("context_wait_s", context_wait_s), ("longest_gap_s", longest_gap_s)):
            if not seconds > 0:
                raise HeteroKVError(f"Engine: {name} is {seconds}; it must be more than 0")
        self.tokenizer = model.tokenizer
        injection.placed(max_batch, max_seq_len)
        forward = ModelForward(model.model, model.tokenizer)
        self._speculation = open_speculation(
            forward, model.tokenizer, speculation, max_seq_len=max_seq_len, sequences=max_batch,
            longest_gap_s=longest_gap_s,
        )  # fmt: skip
        self._store = injection.common_store(max_seq_len, max_batch, kv_tokens)
        continues = injection.needs_cache and not forward.longest_rotates_all
        self._prefixes = ResidentPrefixes(injection.attention_operators() if continues else None, kept_prefixes)
        empty = forward.new_cache(self._store)
        shares = self._prefixes.can_share(empty)
        if context_folder is not None and shares:
            contexts = contexts_at(context_folder, context_cache_gb, context_local_gb, context_wait_s)
            self._prefixes.stored = StoredPrefixes(contexts, empty, self._store, contexts_per_tenant)
        elif context_folder is not None:
            _logger.warning("context_folder %s is not used: these rules cannot reuse a prefix exactly", context_folder)
        self._swaps, self._queues = SwapFolder(injection), Queues()
        checkpoints = Checkpoints(round(checkpoint_gb * 1e9) if shares else 0, empty)
        speed = PromptSpeed()
        order = PromptOrder(self._queues, self._prefixes, speed)
        admission = Admission(
            self._queues, Memory(self._store, self._prefixes, self._swaps), self._swaps, self._prefixes, order,
            lambda: forward.new_cache(self._store), checkpoints, max_batch,
        )  # fmt: skip
        draft, size = self._speculation.draft, PartSize(longest_gap_s, part)
        turn = EngineTurn(rules=injection, draft_rules=None if draft is None else draft.rules)
        outputs = OutputProcessor(self._queues, self._prefixes)
        decoder = RowDecoder(forward, self._queues, outputs, size, self._speculation, admission)
        self._scheduler = Scheduler(
            forward, self._queues, admission, outputs, checkpoints, order, size, speed, turn,
            AnswerPace(longest_gap_s), decoder,
        )  # fmt: skip
        self.max_seq_len = self._store.capacity
        self._inputs = InputProcessor(model, injection, self.max_seq_len, self._speculation)
        self.vocab_size = self._inputs.answers.vocab_size
        self._loop = EngineLoop(
            self._scheduler, self._queues, self._prefixes, self._swaps, turn, starts_thread=starts_thread
        )
        self._report = EngineReport(
            self._store, self._queues, self._prefixes, self._scheduler, self._speculation, self._loop, max_batch,
            injection.bytes_per_token(), empty.is_croppable,
        )  # fmt: skip

    @property
    def speculation(self) -> str:
        """How tokens are guessed unless a request says; `off` if the model or its rules cannot verify guesses."""
        return self._speculation.in_effect()

    @property
    def ways(self) -> Mapping[str, str | None]:
        """The values of `speculation` that a request may give, each with the reason why it has no effect, or None."""
        return self._speculation.ways

    @property
    def ends(self) -> frozenset[int]:
        """The model's own end-of-turn tokens at this moment."""
        return self._inputs.answers.ends

    def status(self) -> EngineStatus:
        """The engine's present state. Any thread may call it, also during a step."""
        return self._report.status()

    def sequences(self) -> list[SequenceStatus]:
        """The sequences that later prompts can reuse, as `EngineReport.sequences`; any thread may call it."""
        return self._report.sequences()

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
            messages: in OpenAI's format, see `hetero_kv.models.messages.read_messages`: each with "role" and "content",
                a text; an assistant's also with "tool_calls" and "reasoning_content".
            tools: functions that the model may call, in OpenAI's format.
            thinks: whether a reasoning model thinks before it answers; None for the template's default.
            variables: values for other variables of the template, such as {"reasoning_effort": "high"}.

        Raises HeteroKVError as `hetero_kv.models.turns.TurnTokens`.
        """
        return self._inputs.encode(messages, tools, thinks, variables)

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
        """Generate the continuation of a prompt.

        Args:
            prompt: a text, whose control tokens are plain text, or token ids.
            sampling: how tokens are chosen; None takes the likeliest ones.
            question: how many of the prompt's last tokens are a question about the others, for rules whose
                `observation` is `question`; None if unknown.
            priority: requests with a smaller number are admitted first, and preempt running ones with a larger number.
            markers: ids of control tokens and their texts, which pieces give separately from text, as in
                `hetero_kv.serving.answers.AnswerParser`.
            reuses: whether a prefix that was computed before is reused; otherwise all of the prompt is computed.
            speculation: how its tokens are guessed: `off`, `lookup`, `sparse`, `auto`, or the name of its draft model;
                None takes the engine's.
            tenant: the owner of the request. Prefixes are reused only from requests of the same tenant, in memory and
                on the disk; "" is a tenant too.
            answered: the first tokens of the answer, which another engine chose with the same `sampling`; random
                numbers, penalties and grammar continue after them. The stream has the tokens that follow, the
                completion has all.

        Returns the stream of its tokens.

        Raises:
            CacheFullError: the prompt does not fit into `max_seq_len`.
            HeteroKVError: the prompt is empty or has unknown tokens, `speculation` is unknown, `answered` has more
                tokens than the answer may have, or the engine is closed.
        """
        request, reason = self._inputs.request(
            prompt,
            sampling or SamplingParams(),
            self._loop.new_stream(),
            markers=markers or {},
            answered=answered,
            speculation=speculation,
            question=question,
            priority=priority,
            reuses=reuses,
            tenant=tenant,
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
        """Compute what the forward that chose a token of an answer attended to.

        That forward is computed again, over the blocks of an ended or running request. If there are none, all tokens
        before it are computed again. The numbers are those of the answer if the blocks come from the request that gave
        it; after a new prefill, they are so with `prompt_tokens`, to rounding.

        Args:
            tokens: a prompt and its answer, at least up to the token. Later ones are not read.
            position: the token's place in `tokens`, at least 1.
            prompt_tokens: how many of the tokens were the prompt, so that the answer's first token is
                `tokens[prompt_tokens]`; that one was chosen by the prompt's exact attention. If None, and tokens must
                be computed again, all but the last before `position` are treated as the prompt.
            bins: the largest number of runs of neighbouring tokens that get a number; or the first token of each run.
            priority, tenant: as of `generate`.

        Returns the stream, without pieces, whose result is an `Attended`. Cancelled, it raises HeteroKVError.

        Raises:
            CacheFullError: the tokens do not fit into `max_seq_len`.
            HeteroKVError: the attention of a layer, which the message names, cannot be recorded, an argument is outside
                of its range, or the engine is closed.
        """
        return self._loop.submit(
            self._inputs.replay(
                tokens, position, prompt_tokens, bins, self._loop.new_stream(), priority=priority, tenant=tenant
            )
        )

    def step(self) -> bool:
        """Compute one step: a part of a prompt, and a token of every request whose prompt is computed.

        Without requests, writes a kept sequence to `context_folder`. Ctrl-C ends the wait for the step, not the step.
        Returns whether there was anything to compute.
        """
        return self._loop.step()

    def save_kept(self) -> None:
        """Write the kept sequences to `context_folder` now, for other engines; requests wait, a failure is logged."""
        self._loop.save_kept()

    def close(self) -> None:
        """End all requests as cancelled, and the engine's thread; free all blocks. Further calls do nothing."""
        self._loop.close()
        self._speculation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
