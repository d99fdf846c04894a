"""Fidelity to full attention on any text: it needs no labels, only the user's prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from hetero_kv.errors import ConfigError
from hetero_kv.evals.config_spec import BASELINE
from hetero_kv.evals.configured_model import ConfiguredModel
from hetero_kv.evals.generation import cache_bytes, counted, greedy
from hetero_kv.evals.logits_task import LogitsTask, LogitsTaskRequest
from hetero_kv.evals.outcome import Cost, Outcome
from hetero_kv.evals.prompt import Prefilled
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.tasks.registry import register
from hetero_kv.evals.teacher_forcing import Continuation, force
from hetero_kv.evals.text_windows import text_windows


class FidelityTask(LogitsTask):
    """Teacher forcing of the untouched model's greedy continuation through each method.

    Prompts are the user's files, each whole, as a question in the chat template; without files, passages of the
    haystack, which the model continues. The score is the share of decoded tokens whose most likely next token is full
    attention's. Details are the Kullback-Leibler divergence of the next token's distribution, and per layer the share
    of the attention mass that the method covers. The untouched model's score is 1.
    """

    name = "fidelity"
    meaning = "agreement with the untouched model on its own continuation of your texts: top-1, KL, block recall"

    def require_methods(self, request: LogitsTaskRequest, model: ConfiguredModel) -> None:
        """See LogitsTask: raises ConfigError for a file that does not fit, instead of leaving it out."""
        for file in request.prompt_files:
            if reason := model.refusal(self._sample(request, file.name, 0, file.text)):
                raise ConfigError(f"prompt_file {file.name!r} cannot be used: {reason}")

    def samples(self, request: LogitsTaskRequest) -> Iterator[Sample]:
        if request.prompt_files:
            texts = [(file.name, len(request.encode(file.text)), file.text) for file in request.prompt_files]
        else:
            texts = list(text_windows(self.name, request))
        for called, length, text in texts:
            yield self._sample(request, called, length, text)

    def _sample(self, request: LogitsTaskRequest, called: str, length: int, text: str) -> Sample:
        return Sample(
            id=f"{self.name}/{called}",
            task=self.name,
            turns=(text,),
            answers=((),),
            length=length,
            depth=None,
            max_new_tokens=max(2, request.max_new_tokens),
            raw_prompt=not request.prompt_files,
        )

    def measure(self, sample: Sample, model: ConfiguredModel, methods: Sequence[str]) -> Iterator[Outcome]:
        prompt = model.prompt(sample)
        with model.prefilled(BASELINE, prompt) as ready:
            continuation, cost = _continuation(model, sample, ready)
        # Free the untouched model's cache before the methods allocate theirs.
        del ready
        text = model.loaded.tokenizer.decode(list(continuation.tokens), skip_special_tokens=True)
        for method in methods:
            if method == BASELINE:
                yield Outcome(BASELINE, (text,), cost, Score(1.0, {"top_1_agreement": 1.0, "kl_divergence": 0.0}))
                continue
            with model.prefilled(method, prompt, measure_recall=model.measure_recall) as ready:
                start = time.perf_counter()
                found = force(ready.model, ready.cache, continuation)
                seconds = time.perf_counter() - start
                steps = len(found.agrees)
                # Measuring the recall computes full attention at every step, so the speed is meaningless.
                tokens_per_s = None if model.measure_recall else steps / seconds
                cost = Cost(
                    len(prompt.tokens),
                    steps,
                    ready.seconds,
                    seconds,
                    tokens_per_s,
                    cache_bytes(ready.cache),
                    ready.shared,
                    counted=counted(ready.cache),
                )
            parts = {"top_1_agreement": found.agreement, "kl_divergence": found.mean_divergence}
            recall = found.mean_recall()
            details = {"steps": steps} | ({} if recall is None else {"block_recall": list(found.recall)})
            parts |= {} if recall is None else {"block_recall": recall}
            yield Outcome(method, (), cost, Score(found.agreement, parts), details)


def _continuation(model: ConfiguredModel, sample: Sample, ready: Prefilled) -> tuple[Continuation, Cost]:
    """The greedy continuation of the untouched model, up to the end of the answer, and its cost.

    If the answer ends at once, the continuation goes on after its end: the prefill yields the first token, so a
    single token compares nothing.
    """
    logits: list[torch.Tensor] = []

    def keep(row: torch.Tensor) -> None:
        logits.append(row.float().cpu())

    answer = greedy(ready.model, ready.cache, ready.logits, sample.max_new_tokens, model.ends, keep)
    if len(answer.tokens) == 1:
        logits.clear()
        answer = greedy(ready.model, ready.cache, ready.logits, sample.max_new_tokens, frozenset(), keep)
    steps = len(answer.tokens) - 1
    cost = Cost(
        ready.cache.get_seq_length() - steps,
        len(answer.tokens),
        ready.seconds,
        answer.seconds,
        steps / answer.seconds,
        cache_bytes(ready.cache),
        ready.shared,
    )
    # The first row chose the first token, which the prefill yields.
    return Continuation(tuple(answer.tokens), torch.cat(logits[1:])), cost


register(FidelityTask())
