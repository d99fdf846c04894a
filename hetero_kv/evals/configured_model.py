"""A loaded model under several methods: injects and ejects their rules, and shares the prefill of a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache

from hetero_kv.adapter.loaded_weights import LoadedWeights
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import ConfigError
from hetero_kv.evals.budget import attended_tokens
from hetero_kv.evals.config_spec import BASELINE, ConfigSpec, settings_for, settings_in_force
from hetero_kv.evals.generation import cache_bytes, counted, greedy, prompt_logits
from hetero_kv.evals.outcome import Cost, Outcome
from hetero_kv.evals.prompt import Prefilled, Prompt
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.shared_prefill import record_prefill, shares_prefill
from hetero_kv.models import LoadedModel
from hetero_kv.models.text_encoding import CHARACTERS_OF_A_TOKEN
from hetero_kv.models.turns import TurnTokens
from hetero_kv.rules.injecting import eject, inject
from hetero_kv.rules.injection import Injection
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.model_answers import ModelAnswers
from hetero_kv.serving.speculation.drafter import DraftCounts
from hetero_kv.serving.speculation.opening import Guessing, open_speculation
from hetero_kv.serving.speculation.speculation import Speculation
from hetero_kv.serving.speculation.ways import require_way_or_model


@dataclass(frozen=True)
class _Method:
    spec: ConfigSpec
    shares_prefill: bool
    continues_exactly: bool
    observation_len: int
    chunk_size: int
    max_seq_len: int
    described: dict[str, Any]


class ConfiguredModel:
    """A model under several configurations, and without rules as the baseline.

    Args:
        loaded: the model, without rules; it is without rules again after every method.
        configs: the methods.
        baseline: whether to include the untouched model, under the name "full". It prefills and answers with
            transformers alone.
        share_baseline: let the untouched model start from the recorded prefill too, which saves a prefill per sample;
            its attention is the same up to rounding.
        measure_recall: let tasks measure the attention mass that a method covers, which makes its steps slower.
        speculation: how methods guess the next tokens of answers, as for `Engine`. Answers are the same.
        settings: override the rules files of all configs whose operators take them, but not a config's own settings.
        settings_file: every config overrides these.

    Raises:
        HeteroKVError: rules that do not fit the model, or no method at all.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        configs: Sequence[ConfigSpec],
        *,
        baseline: bool = True,
        share_baseline: bool = False,
        measure_recall: bool = True,
        speculation: Guessing = "off",
        settings: Mapping[str, Any] | None = None,
        settings_file: Mapping[str, Any] | None = None,
    ) -> None:
        if not configs and not baseline:
            raise ConfigError("there is nothing to run: give a config, or leave the baseline in")
        self.loaded = loaded
        self.turns = TurnTokens(loaded.tokenizer)
        self.ends = ModelAnswers(loaded.model, loaded.tokenizer).ends
        self.share_baseline = share_baseline
        self.measure_recall = measure_recall
        self._guessing = speculation
        self.speculation = require_way_or_model(speculation) if isinstance(speculation, str) else speculation.name
        self._speculations: dict[str, Speculation] = {}
        self._has_baseline = baseline
        self._overrides = dict(settings or {})
        self._settings_file = dict(settings_file or {})
        self._methods = {spec.name: self._prepared(spec) for spec in configs}

    # -- the interface of Subject

    @property
    def methods(self) -> tuple[str, ...]:
        """See Subject; the baseline comes first."""
        return (*((BASELINE,) if self._has_baseline else ()), *self._methods)

    @property
    def exact_methods(self) -> tuple[str, ...]:
        """The methods, without the baseline, that prefill every turn with full attention in every layer."""
        return tuple(name for name, method in self._methods.items() if method.continues_exactly)

    def described(self) -> dict[str, Any]:
        """See Subject: the model, and all settings in force."""
        model = {
            "model": self.loaded.name,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "device": self.loaded.model.device.type,
            "weights": LoadedWeights.of(self.loaded.model).in_short,
            **({} if self.measure_recall else {"measure_recall": False}),
        }
        baseline = {**model, "prefill": "shared" if self.share_baseline else "own"}
        found = {BASELINE: baseline} if self._has_baseline else {}
        guesses = {} if self.speculation == "off" else {"speculation": self.speculation}
        return found | {name: {**model, **method.described, **guesses} for name, method in self._methods.items()}

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a sample: the methods' smallest capacity, else the model's training context length."""
        limits = [method.max_seq_len for method in self._methods.values()]
        override = self._overrides.get("max_seq_len")
        if isinstance(override, int):
            limits.append(override)
        return min(limits, default=self.loaded.context_length)

    def refusal(self, sample: Sample) -> str | None:
        """See Subject: refuses a sample that exceeds `max_seq_len`."""
        characters, most = sum(map(len, sample.turns)), self.max_seq_len * CHARACTERS_OF_A_TOKEN
        if characters > most:
            return (
                f"it has {characters:,} characters, of which no more than {most:,} can fit, and max_seq_len is "
                f"{self.max_seq_len}; shorten it, or raise max_seq_len"
            )
        needed = self.prompt(sample).capacity
        if needed <= self.max_seq_len:
            return None
        return (
            f"it takes {needed} tokens with its answers, and max_seq_len is {self.max_seq_len}; set it to {needed} in "
            "another run to have this sample"
        )

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text, without chat template and special tokens."""
        return len(self.encoded(text))

    def encoded(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        return self.turns.text(text)

    @cached_property
    def template_tokens(self) -> int:
        """The number of tokens that the chat template adds to a question."""
        return len(self.turns.first("?")) - self.count_tokens("?")

    def prompt(self, sample: Sample) -> Prompt:
        """The sample's first turn as tokens."""
        first = sample.turns[0]
        tokens = self.turns.raw(first) if sample.raw_prompt else self.turns.first(first)
        following = sum(len(self._following(sample, turn, None)) for turn in sample.turns[1:])
        prefix = self.encoded(sample.answer_prefix)
        question = None
        # A raw prompt without a known question is a text to continue.
        if sample.question or not sample.raw_prompt:
            question = self.turns.question(tokens, first, sample.question or None, is_raw=sample.raw_prompt)
        tokens = [*tokens, *prefix]
        capacity = len(tokens) + following + len(sample.turns) * sample.max_new_tokens
        return Prompt(tokens, capacity, None if question is None else question + len(prefix))

    def _following(self, sample: Sample, turn: str, last_token: int | None) -> list[int]:
        if sample.raw_prompt:
            tokens = self.encoded(turn)
        else:
            tokens = self.turns.following(turn, -1 if last_token is None else last_token)
        return [*tokens, *self.encoded(sample.answer_prefix)]

    # -- running

    def answers(self, sample: Sample, methods: Sequence[str]) -> Iterator[Outcome]:
        """See Subject: greedy answers; all turns of a sample are one conversation."""
        prompt = self.prompt(sample)
        for method in methods:
            with self.prefilled(method, prompt) as ready:
                yield self._conversation(method, sample, prompt, ready)

    def _conversation(self, method: str, sample: Sample, prompt: Prompt, ready: Prefilled) -> Outcome:
        predictions, logits = [], ready.logits
        prompt_tokens, generated_tokens = len(prompt.tokens), 0
        prefill_s, decode_s, answer = ready.seconds, 0.0, None
        said, speculation, drafts = list(prompt.tokens), self._speculations.get(method), DraftCounts()
        for turn in sample.turns:
            if answer is not None:
                turn_tokens = self._following(sample, turn, answer.tokens[-1])
                start = time.perf_counter()
                # The cache does not have the last token of an answer yet.
                logits = prompt_logits(ready.model, [answer.tokens[-1], *turn_tokens], ready.cache, len(turn_tokens))
                prefill_s += time.perf_counter() - start
                prompt_tokens += len(turn_tokens)
                said += turn_tokens
            answer = greedy(
                ready.model,
                ready.cache,
                logits,
                sample.max_new_tokens,
                self.ends,
                before=said,
                speculation=speculation,
            )
            said += answer.tokens
            drafts.add(answer.drafts.drafted, answer.drafts.accepted)
            predictions.append(self.loaded.tokenizer.decode(answer.tokens, skip_special_tokens=True))
            generated_tokens += len(answer.tokens)
            decode_s += answer.seconds
        decoded = generated_tokens - len(sample.turns)
        cost = Cost(
            prompt_tokens,
            generated_tokens,
            prefill_s,
            decode_s,
            decoded / decode_s if decoded else None,
            cache_bytes(ready.cache),
            ready.shared,
            drafts.drafted,
            drafts.accepted,
            counted(ready.cache),
        )
        return Outcome(method, tuple(predictions), cost)

    @contextmanager
    def prefilled(self, method: str, prompt: Prompt, *, measure_recall: bool = False) -> Iterator[Prefilled]:
        """Yield the prompt in a cache of `method`, whose rules stay in the model while the context is open.

        Args:
            measure_recall: whether to measure the attention mass that the method covers.

        Raises:
            OutOfMemoryError: the prompt does not fit into the free memory.
        """
        model = self.loaded.model
        if method == BASELINE:
            yield self._untouched(prompt)
            return
        prepared = self._methods[method]
        if prepared.shares_prefill:
            self._record(prompt)
        # `_prepared` has already compiled the kernels.
        injection, speculation = self._inject(prepared.spec, measure_recall), self._speculations.get(method)
        injection.preparation.skip()
        injection.sparse_drafts = speculation is not None and speculation.in_effect() == "sparse"
        try:
            if prepared.shares_prefill:
                assert prompt.recording is not None
                cache = prompt.recording.cache_for(model)
                yield Prefilled(model, cache, prompt.recording.logits, prompt.recording_s, True)
            else:
                cache = HeteroCache(model, prompt.capacity, tokenizer=self.loaded.tokenizer)
                start = time.perf_counter()
                logits = prompt_logits(model, prompt.tokens, cache, prompt.question)
                yield Prefilled(model, cache, logits, time.perf_counter() - start, False)
        finally:
            eject(model)

    def _untouched(self, prompt: Prompt) -> Prefilled:
        model = self.loaded.model
        if self.share_baseline and any(method.shares_prefill for method in self._methods.values()):
            self._record(prompt)
            assert prompt.recording is not None
            cache = prompt.recording.untouched_cache(model)
            return Prefilled(model, cache, prompt.recording.logits, prompt.recording_s, True)
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        start = time.perf_counter()
        logits = prompt_logits(model, prompt.tokens, cache)
        return Prefilled(model, cache, logits, time.perf_counter() - start, False)

    def _record(self, prompt: Prompt) -> None:
        if prompt.recording is not None:
            return
        sharing = [method for method in self._methods.values() if method.shares_prefill]
        start = time.perf_counter()
        prompt.recording = record_prefill(
            self.loaded.model,
            torch.tensor([prompt.tokens]),
            observation_len=max(method.observation_len for method in sharing),
            question=prompt.question,
            chunk_size=sharing[0].chunk_size,
            max_seq_len=prompt.capacity,
        )
        prompt.recording_s = time.perf_counter() - start

    # -- rules

    def _inject(self, spec: ConfigSpec, measure_recall: bool = False) -> Injection:
        wins = settings_for(spec, self._overrides) | ({"measure_recall": True} if measure_recall else {})
        return inject(self.loaded.model, replace(spec, settings=wins), settings_file=self._settings_file)

    def _prepared(self, spec: ConfigSpec) -> _Method:
        """A method's properties, found by injecting its rules once; this also compiles its kernels."""
        injection = self._inject(spec)
        try:
            _require_same_weights(injection, spec)
            injection.compile_kernels()
            if self.speculation != "off":
                self._speculations[spec.name] = self._opened_speculation(injection)
            observed = max((operator.observed_queries for operator in injection.attention_operators()), default=0)
            return _Method(
                spec,
                shares_prefill(injection),
                all(each.prefills_exactly and each.continues_exactly for each in injection.operators.values()),
                max(1, observed),
                injection.engine.chunk_size,
                injection.max_seq_len(),
                settings_in_force(spec, injection),
            )
        finally:
            eject(self.loaded.model)

    def _opened_speculation(self, injection: Injection) -> Speculation:
        """What guesses the tokens of the method whose rules are in the model."""
        found = open_speculation(
            ModelForward(self.loaded.model), self.loaded.tokenizer, self._guessing, max_seq_len=injection.max_seq_len()
        )
        # Of the same draft model there is one for all methods.
        self._guessing = found.draft or self._guessing
        return found

    def attended(self, method: str, length: int) -> float | None:
        """Tokens that a step attends to after `length` tokens, the mean over layers; None if unknown."""
        if method == BASELINE:
            return float(length)
        injection = self._inject(self._methods[method].spec)
        try:
            return attended_tokens(injection, length)
        finally:
            eject(self.loaded.model)


def _require_same_weights(injection: Injection, spec: ConfigSpec) -> None:
    """Raise ConfigError if rules quantize weights: methods share one model, and the rounding could not be undone."""
    for operator in injection.operators.values():
        if isinstance(operator, QuantizedModule) and not operator.waits_for_blocks():
            raise ConfigError(
                f"{spec.name}: weights is {operator.settings.weights}, and all methods of an evaluation run with the "
                "same weights; leave weights auto, and give --dtype for another number type"
            )
