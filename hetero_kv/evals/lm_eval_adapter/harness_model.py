"""Answers lm_eval's requests by an `Engine`: log-likelihoods, generated answers, chat templates."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.evals.lm_eval_adapter.forced_tokens import ForcedTokens
from hetero_kv.evals.lm_eval_adapter.generation_arguments import sampling_params
from hetero_kv.evals.lm_eval_adapter.model_arguments import LEFT, WHERE, ModelArguments
from hetero_kv.loading import load_model
from hetero_kv.models import LoadedModel
from hetero_kv.models.chat_template import rendered, thinking_variable
from hetero_kv.models.templates import TemplateLimitError
from hetero_kv.rules.settings_file import read_settings_file, read_trusted_modules
from hetero_kv.serving.engine import Engine
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.stream import Completion, Stream

_logger = logging.getLogger(__name__)

# Requests that the engine has at a time. It batches and shares among all that wait, and looks through them every step.
_MOST_WAITING = 256
# No reader waits for tokens, so prompts are computed in large parts.
_NO_HURRY_S = 3600.0


class LogLikelihood(NamedTuple):
    """A model's log-likelihood of a continuation.

    Attributes:
        logprob: the sum of its tokens' log-probabilities, nats.
        is_greedy: whether each of its tokens is the likeliest one.
    """

    logprob: float
    is_greedy: bool


class _Scored(NamedTuple):
    """A context and its continuation, as tokens."""

    context: list[int]
    continuation: list[int]


class HarnessModel:
    """Computes lm_eval's requests by the method whose rules a model has.

    A context is a prompt. Its continuation is decoded token by token, each token forced, so that its log-probabilities
    are those of the configured method. The first one comes out of the prompt's prefill, as the first token of an answer
    does; `decoded_context` changes that.

    Texts become tokens as in lm_eval's own model `hf`: a context's white space at the end belongs to the continuation,
    both are encoded together and then split, and control tokens in a text count as such.

    Args:
        loaded: a model with rules.
        arguments: of which `batch` and what follows it are read.

    Raises:
        ConfigError: `prefix_token_id` is no token of the model.
        HeteroKVError: see `Engine`; or `enable_thinking` is given and the chat template has no such switch.
    """

    def __init__(self, loaded: LoadedModel, arguments: ModelArguments) -> None:
        self.loaded, self.arguments = loaded, arguments
        self._tokenizer = loaded.tokenizer
        vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        prefix = arguments.prefix_token_id
        if prefix is not None and prefix >= vocab_size:
            raise ConfigError(f"{WHERE}: prefix_token_id is {prefix}; the model has tokens 0 to {vocab_size - 1}")
        named = (prefix, self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        self._prefix: int | None = next((token for token in named if token is not None), None)
        self._prefix_text: str = "" if self._prefix is None else self._tokenizer.decode([self._prefix])
        self._control_tokens = {token.content: number for number, token in self._tokenizer.added_tokens_decoder.items()}
        thinks = arguments.enable_thinking
        self._template_variables = {} if thinks is None else {thinking_variable(self._tokenizer): thinks}
        self._warned_of_system = False
        self.engine = Engine(loaded, max_batch=arguments.batch, longest_gap_s=_NO_HURRY_S, starts_thread=False)

    @classmethod
    def load(cls, arguments: ModelArguments) -> HarnessModel:
        """Load the model that the arguments name, under their rules and the user's settings file.

        Raises the errors of `hetero_kv.load_model`, and those of the class.
        """
        loaded = load_model(
            arguments.pretrained,
            config=arguments.config,
            gguf_path=arguments.gguf_path,
            dtype=arguments.dtype,
            device=arguments.device,
            trust_remote_code=arguments.trust_remote_code,
            trust_rules=(*arguments.trust_rules, *read_trusted_modules()),
            settings_file=read_settings_file(),
            **arguments.settings,
        )
        return cls(loaded, arguments)

    # -- log-likelihoods

    def loglikelihoods(self, pairs: Iterable[tuple[str, str]]) -> Iterator[LogLikelihood]:
        """The log-likelihood of each continuation after its context, in their order.

        A context may be empty; then the prefix token is the context. Continuations that differ in their last token
        alone are computed together.

        Raises HeteroKVError, before anything is computed, for a continuation without tokens, and for a request that
        does not fit into `max_seq_len`, unless `truncation` says otherwise.
        """
        return self._computed(self._fitted([self._encoded_pair(*pair) for pair in pairs]))

    def rolling_loglikelihoods(self, texts: Iterable[str]) -> Iterator[float]:
        """The log-likelihood of each text, nats, with the prefix token before it.

        A text that does not fit into `max_seq_len` is cut into windows, as lm_eval's own models do: each token counts
        once, and the last window begins as early as it can.
        """
        windows = [
            list(_windows(self._encoded(text), self._required_prefix(), self.engine.max_seq_len)) for text in texts
        ]
        found = self._computed([window for of_text in windows for window in of_text])
        return (math.fsum(next(found).logprob for _ in of_text) for of_text in windows)

    def _computed(self, requests: Sequence[_Scored]) -> Iterator[LogLikelihood]:
        # Requests that differ in their last token alone -> these tokens, in the order of the first of each.
        alike: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, None]] = {}
        keys = []
        for context, continuation in requests:
            keys.append((tuple(context), tuple(continuation[:-1])))
            alike.setdefault(keys[-1], {})[continuation[-1]] = None
        return self._in_order(keys, [continuation[-1] for _, continuation in requests], alike)

    def _in_order(
        self, keys: Sequence[Any], last_tokens: Sequence[int], alike: Mapping[Any, Mapping[int, None]]
    ) -> Iterator[LogLikelihood]:
        """The result of each request, by its key in `alike` and its last token."""
        masks: list[ForcedTokens] = []

        def prompts() -> Iterator[tuple[Sequence[int], SamplingParams]]:
            for (context, beginning), choices in alike.items():
                decoded = min(self.arguments.decoded_context, len(context) - 1)
                prompt, forced = context[: len(context) - decoded], context[len(context) - decoded :]
                tokens = [*forced, *beginning, next(iter(choices))]
                masks.append(ForcedTokens(tokens, list(choices)))
                yield prompt, SamplingParams(max_new_tokens=len(tokens), ignore_eos=True, logprobs=1, mask=masks[-1])

        completions = self._completions(prompts())
        computed: dict[Any, Mapping[int, LogLikelihood]] = {}
        groups = iter(alike.items())
        for key, last in zip(keys, last_tokens, strict=True):
            while key not in computed:
                (context, beginning), choices = next(groups)
                completion = next(completions)
                pieces = completion.pieces[len(completion.pieces) - 1 - len(beginning) :]
                computed[context, beginning] = _log_likelihoods(pieces, choices, masks[len(computed)])
            yield computed[key][last]

    # -- answers

    def answers(self, requests: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
        """The answer to each context under its generation arguments, in their order, without the text that ends it.

        Raises, before anything is computed:
            ConfigError: an unknown generation argument, or one outside its range.
            HeteroKVError: a context and an answer of `max_gen_toks` do not fit into `max_seq_len`, and `truncation`
                does not say otherwise.
        """
        params, contexts = [], []
        for context, arguments in requests:
            params.append(sampling_params(arguments, self.arguments.max_gen_toks, self._control_tokens))
            contexts.append(self._encoded(context) or [self._required_prefix()])
        rooms = [each.max_new_tokens for each in params]
        fitted = self._contexts_that_fit(contexts, rooms, "an answer of max_gen_toks")
        completions = self._completions(zip(fitted, params, strict=True))
        return (completion.text for completion in completions)

    # -- chat templates

    def chat_text(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the model's chat template.

        System messages that the template refuses are left out, and a warning says so, as lm_eval's own models do.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: whether the text ends with the start of an answer. Otherwise it ends with the last
                message, which an answer continues.

        Raises HeteroKVError if the model has no chat template, or the template cannot render the conversation.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(f"the model {self.loaded.name} has no chat template; leave out --apply_chat_template")
        try:
            pieces = rendered(self._tokenizer, messages, variables=self._template_variables)
        except TemplateLimitError:
            raise
        except HeteroKVError as error:
            others = [message for message in messages if message["role"] != "system"]
            if not others or len(others) == len(messages):
                raise
            pieces = rendered(self._tokenizer, others, variables=self._template_variables)
            if not self._warned_of_system:
                self._warned_of_system = True
                _logger.warning("system messages are left out, because the chat template refuses them: %s", error)
        kept = pieces if add_generation_prompt else pieces[:-1]
        return "".join(piece.content for piece in kept)

    def chat_template(self) -> str:
        """The model's chat template; "" if it has none."""
        return self._tokenizer.get_chat_template() if self._tokenizer.chat_template else ""

    def tokenizer_name(self) -> str:
        """A name of the tokenizer and its chat template, with which lm_eval distinguishes stored requests."""
        template = f"{self.chat_template()}{self._template_variables}"
        return f"{self.loaded.name}-{hashlib.sha256(template.encode()).hexdigest()[:8]}".replace("/", "__")

    # -- tokens

    def _encoded(self, text: str, special: bool | None = None) -> list[int]:
        """A text's tokens; special: whether with the tokenizer's special tokens, None for `add_bos_token`."""
        if special is None:
            begins = bool(self._prefix_text) and text.startswith(self._prefix_text)
            special = False if begins else self.arguments.add_bos_token
        options = {} if special is None else {"add_special_tokens": special}
        return list(self._tokenizer.encode(text, **options))

    def _encoded_pair(self, context: str, continuation: str) -> _Scored:
        if not context:
            tokens = self._encoded(continuation, special=False)
            prefix = self._required_prefix()
            # A continuation that begins with the prefix token has its context already.
            found = _Scored(tokens[:1], tokens[1:]) if tokens[:1] == [prefix] else _Scored([prefix], tokens)
        else:
            kept = context.rstrip()
            before = self._encoded(kept)
            found = _Scored(before, self._encoded(context + continuation)[len(before) :])
        if not found.continuation:
            raise HeteroKVError(
                f"the continuation {continuation!r} has no token of its own behind the context, which ends with "
                f"{context[-40:]!r}; give a continuation with text"
            )
        if not found.context:
            return _Scored([self._required_prefix()], found.continuation)
        return found

    def _required_prefix(self) -> int:
        if self._prefix is None:
            raise ConfigError(
                f"the tokenizer of {self.loaded.name} has no BOS and no EOS token, one of which stands before a text "
                f"without context; name a token: prefix_token_id in {WHERE}"
            )
        return self._prefix

    def _fitted(self, requests: Sequence[_Scored]) -> list[_Scored]:
        contexts = self._contexts_that_fit(
            [request.context for request in requests],
            [len(request.continuation) for request in requests],
            "its continuation",
        )
        return [_Scored(context, request.continuation) for context, request in zip(contexts, requests, strict=True)]

    def _contexts_that_fit(self, contexts: Sequence[list[int]], rooms: Sequence[int], what: str) -> list[list[int]]:
        """The contexts, each short enough for `rooms` tokens after it; `what` names these.

        Raises HeteroKVError if a context is too long and `truncation` does not say "left", or if no context fits.
        """
        # The last token of an answer is not stored.
        capacity = self.engine.max_seq_len + 1
        lengths = [len(context) + room for context, room in zip(contexts, rooms, strict=True)]
        if not lengths or max(lengths) <= capacity:
            return list(contexts)
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        too_long = sum(length > capacity for length in lengths)
        if self.arguments.truncation != LEFT or max(rooms) >= capacity:
            cut = "" if max(rooms) >= capacity else f", or let {WHERE} cut the contexts' beginnings: truncation=left"
            raise HeteroKVError(
                f"{too_long} of {len(lengths)} requests do not fit: the longest has {len(contexts[longest])} tokens of "
                f"context and {rooms[longest]} tokens of {what}, of which {lengths[longest] - 1} are stored, and "
                f"max_seq_len is {capacity - 1}; set max_seq_len to at least {lengths[longest] - 1}{cut}"
            )
        _logger.warning(
            "truncation=left: %d of %d contexts lose their first tokens, up to %d, because max_seq_len is %d",
            too_long,
            len(lengths),
            max(lengths) - capacity,
            capacity - 1,
        )
        return [
            context[max(0, len(context) + room - capacity) :] for context, room in zip(contexts, rooms, strict=True)
        ]

    # -- computing

    def _completions(self, prompts: Iterable[tuple[Sequence[int], SamplingParams]]) -> Iterator[Completion]:
        """The answers to prompts, in their order."""
        streams: deque[Stream] = deque()
        try:
            for tokens, params in prompts:
                streams.append(self.engine.generate(tokens, params))
                if len(streams) == _MOST_WAITING:
                    yield streams.popleft().result()
            while streams:
                yield streams.popleft().result()
        finally:
            for stream in streams:
                stream.cancel()

    def close(self) -> None:
        """Free all blocks."""
        self.engine.close()


def _log_likelihoods(pieces: Sequence[Any], choices: Iterable[int], mask: ForcedTokens) -> dict[int, LogLikelihood]:
    """The log-likelihood of a continuation with each of its last tokens.

    pieces: those of the continuation, with the first of `choices` as its last token.
    """
    before = math.fsum(piece.logprob for piece in pieces[:-1])
    is_greedy = all(next(iter(piece.alternatives)) == piece.token for piece in pieces[:-1])
    likeliest = next(iter(pieces[-1].alternatives))
    found = {
        token: LogLikelihood(before + logprob, is_greedy and token == likeliest)
        for token, logprob in zip(choices, mask.choice_logprobs, strict=True)
    }
    if any(math.isnan(each.logprob) for each in found.values()):
        raise HeteroKVError(
            "a log-likelihood is not a number; a model in float16 may overflow: give dtype=bfloat16 or dtype=float32"
        )
    return found


def _windows(tokens: Sequence[int], prefix: int, longest: int) -> Iterator[_Scored]:
    """A text in windows of at most `longest` stored tokens; the first has the prefix token as its context."""
    done = min(longest, len(tokens))
    if tokens:
        yield _Scored([prefix], list(tokens[:done]))
    while done < len(tokens):
        end = min(done + longest, len(tokens))
        yield _Scored(list(tokens[end - longest - 1 : done]), list(tokens[done:end]))
        done = end
