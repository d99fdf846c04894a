"""Compares every recipe with full attention, on prompts of several kinds, at equal budgets of attended tokens.

    python -m benchmarks.recipe_quality --haystack FILE [--recipes dense,quest,...] [--budgets 32,16,8,4] [--out FILE]

Per recipe and budget (a fraction of the context): block recall; under teacher forcing of the untouched model's
continuation, the share of next tokens that equal full attention's, and the Kullback-Leibler divergence
KL(full || recipe); and the share of correct answers of the recipe's own decoding. A text is prefilled once for all
questions and recipes. A recipe may have settings: `ktransformers:dense_layer_num=2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.equal_budgets import is_full, retrieval_settings, settings_for_budget
from benchmarks.quality_prompts import KINDS, QualityPrompt, Request, shared_beginning
from hetero_kv import eject, inject
from hetero_kv.evals.budget import attended_tokens
from hetero_kv.evals.config_spec import ConfigSpec, config_specs
from hetero_kv.evals.generation import greedy
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.shared_prefill import RecordedPrefill, record_prefill
from hetero_kv.evals.teacher_forcing import Continuation, force, full_attention_continuation
from hetero_kv.models import load_model
from hetero_kv.models.named import DEFAULT_MODEL
from hetero_kv.serving.model_answers import end_tokens

RECIPES = "dense,ktransformers,kvretrieval,quest,snapkv,infllm,streaming"
CHUNK = 1024
#: From this layer on no recipe attends to everything; these layers' recall is compared.
FIRST_COMPARED = 2

_NONE = "\N{EN DASH}"

QualityRow = dict[str, Any]


def recordings(
    model: Any, prompts: list[QualityPrompt], observation_len: int
) -> Iterable[tuple[QualityPrompt, RecordedPrefill]]:
    """The prompts of one text with their prefills; the common prefix is prefilled once."""
    beginning = shared_beginning(prompts)
    common = torch.tensor([prompts[0].tokens[:beginning]])
    text = record_prefill(model, common, observation_len=observation_len, chunk_size=CHUNK)
    for prompt in prompts:
        rest = torch.tensor([prompt.tokens[beginning:]])
        # Room for the forced tokens, and for a fork that decodes.
        capacity = 2 * (len(prompt.tokens) + prompt.max_new_tokens)
        yield (
            prompt,
            record_prefill(
                model, rest, after=text, observation_len=observation_len, chunk_size=CHUNK, max_seq_len=capacity
            ),
        )


class RecipeMeter:
    """Measures recipes on a model, one after the other, on one prompt at a time."""

    def __init__(self, model: Any, tokenizer: Any, threads: int | None) -> None:
        self.model, self.tokenizer, self.threads = model, tokenizer, threads
        self.ends = end_tokens(model)

    def text(self, tokens: Iterable[int]) -> str:
        """Tokens as text, without special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def full(self, prompt: QualityPrompt, recording: RecordedPrefill) -> Continuation:
        """The untouched model's answer."""
        return full_attention_continuation(self.model, recording, prompt.max_new_tokens, self.ends)

    def recipe(
        self, spec: ConfigSpec, share: int, prompt: QualityPrompt, recording: RecordedPrefill, full: Continuation
    ) -> QualityRow:
        """One recipe with a budget of 1/share of the context, on one prompt."""
        injection = inject(self.model, spec.rules, command_line=spec.settings)
        own = retrieval_settings(injection)
        eject(self.model)
        budget = {} if is_full(own) else settings_for_budget(own, recording.tokens // share)
        threads = {} if self.threads is None else {"threads_num": self.threads}
        settings = {**spec.settings, **budget, **threads, "measure_recall": True}
        injection = inject(self.model, spec.rules, command_line=settings)
        try:
            attended = attended_tokens(injection, recording.tokens + len(full.tokens) // 2)
            cache = recording.cache_for(self.model)
            by_itself = cache.fork()
            fidelity = force(self.model, cache, full)
            answer = full.tokens
            if prompt.answer is not None and fidelity.agreement < 1:
                answer = tuple(greedy(self.model, by_itself, recording.logits, prompt.max_new_tokens, self.ends).tokens)
        finally:
            eject(self.model)
        assert attended is not None
        layers = len(fidelity.recall)
        dense = min(own.dense_layer_num, layers)
        stored = recording.tokens + len(full.tokens) // 2
        return {
            "kind": prompt.kind,
            "recipe": spec.name,
            "budget": f"1/{share}" if budget else "all",
            "settings": budget,
            "context": recording.tokens,
            "attended": (attended * layers - dense * stored) / (layers - dense),
            "attended_all_layers": attended,
            "recall": fidelity.mean_recall(FIRST_COMPARED),
            "recall_per_layer": list(fidelity.recall),
            "agreement": fidelity.agreement,
            "divergence": fidelity.mean_divergence,
            "steps": len(fidelity.agrees),
            "right": prompt.is_right(self.text(answer)),
            "answer": self.text(answer),
        }


def measure(arguments: argparse.Namespace, report: Callable[[str], None]) -> list[QualityRow]:
    """A row for every prompt, recipe and budget, and one for the untouched model's answer to each prompt."""
    loaded = load_model(arguments.model, dtype="float32")
    measured = RecipeMeter(loaded.model, loaded.tokenizer, arguments.threads)
    specs = config_specs(arguments.recipes.split(","))
    variants = config_specs(arguments.variants.split(",")) if arguments.variants else []
    haystack = Haystack.from_file(arguments.haystack) if arguments.haystack else None
    request = Request(loaded.tokenizer, arguments.length, arguments.prompts, arguments.tokens, arguments.seed, haystack)
    variants_and_shares = [(spec, share) for spec in specs for share in _shares(loaded.model, spec, arguments.budgets)]
    variants_and_shares += [(spec, arguments.variant_budget) for spec in variants]
    for spec in (*specs, *variants):
        # Find mistakes in the rules before measuring anything.
        inject(loaded.model, spec.rules, command_line=spec.settings)
        eject(loaded.model)
    rows: list[QualityRow] = []
    for kind in arguments.kinds.split(","):
        for number, (prompt, recording) in enumerate(recordings(loaded.model, KINDS[kind](request), 128)):
            full = measured.full(prompt, recording)
            text = measured.text(full.tokens)
            rows.append({"kind": kind, "recipe": "untouched", "right": prompt.is_right(text), "answer": text})
            report(f"{kind} {number}: {recording.tokens} tokens, untouched: {text!r}, expected: {prompt.answer!r}")
            for spec, share in variants_and_shares:
                row = measured.recipe(spec, share, prompt, recording, full)
                rows.append({**row, "prompt": number})
            if arguments.out:
                arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
            report(_markdown(rows[-len(variants_and_shares) :]))
    return rows


def _shares(model: Any, spec: ConfigSpec, budgets: list[int]) -> list[int]:
    """The budgets for a recipe; only one if it attends to everything at any budget."""
    injection = inject(model, spec.rules, command_line=spec.settings)
    full = is_full(retrieval_settings(injection))
    eject(model)
    return budgets[:1] if full else budgets


def _mean(rows: list[QualityRow], key: str, form: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    return format(statistics.fmean(values), form) if values else _NONE


def _cell(rows: list[QualityRow]) -> str:
    if not rows:
        return ""
    parts = [_mean(rows, "recall", ".2f"), _mean(rows, "agreement", ".2f"), _mean(rows, "divergence", ".3f")]
    judged = [row["right"] for row in rows if row["right"] is not None]
    return " / ".join(parts) + (f" / {sum(judged)} of {len(judged)}" if judged else "")


def _markdown(rows: list[QualityRow]) -> str:
    """A line per recipe and a column per budget: the mean over prompts, as a Markdown table."""
    measured = [row for row in rows if row["recipe"] != "untouched"]
    # "all" before 1/32, 1/16, ...
    budgets = sorted({row["budget"] for row in measured}, key=lambda budget: -int(budget.partition("/")[2] or 1000))
    lines = [f"| recipe | {' | '.join(budgets)} |", "|---" * (len(budgets) + 1) + "|"]
    for recipe in dict.fromkeys(row["recipe"] for row in measured):
        own = [row for row in measured if row["recipe"] == recipe]
        cells = [_cell([row for row in own if row["budget"] == budget]) for budget in budgets]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def report_of(rows: list[QualityRow]) -> str:
    """Markdown, a table per kind of prompt: recall / agreement / KL in nats / right answers."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    parts = ["Recall / next-token agreement / KL, nats / right answers"]
    for kind in kinds:
        own = [row for row in rows if row["kind"] == kind]
        untouched = [row["right"] for row in own if row["recipe"] == "untouched" and row["right"] is not None]
        right = f"; the untouched model is right in {sum(untouched)} of {len(untouched)}" if untouched else ""
        parts += ["", f"{kind}{right}", "", _markdown(own)]
    return "\n".join(parts)


def main() -> None:
    """Print the tables; write the rows with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--haystack", type=Path, help="essays: text, or JSON with a `text` field")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--variants", default="", help="recipes that are measured at --variant_budget only")
    parser.add_argument("--budgets", default="32,16,8,4", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--variant_budget", default=16, type=int)
    parser.add_argument("--length", default=6000, type=int, help="tokens of a prompt")
    parser.add_argument("--prompts", default=3, type=int, help="prompts of each kind, over one text")
    parser.add_argument("--tokens", default=24, type=int, help="tokens that prose is continued with")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--threads", default=None, type=int, help="of torch and of the engine")
    parser.add_argument("--out", type=Path, help="JSON lines, a row for each prompt, recipe and budget")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = measure(arguments, report=lambda line: print(line, flush=True))
    print(report_of(rows))


if __name__ == "__main__":
    main()
