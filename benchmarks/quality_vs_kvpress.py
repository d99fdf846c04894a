"""Retrieval quality beside kvpress at equal budgets: both on the same samples, by the same harness.

    python -m benchmarks.quality_vs_kvpress --out DIR [--budgets 256,512] [--task needle,passkey] [--lengths 2k]

A budget is the number of prompt tokens that a step attends to in every layer (the mean over layers for PyramidKV).
kvpress prefills the whole prompt, the question included, and drops all but the budget once; hetero-kv keeps everything
and chooses the budget's tokens as its recipes do. Generated tokens come on top in kvpress; in hetero-kv they are part
of the window.

Running it twice with the same flags goes on where the first run stopped.

kvpress pins an older transformers than hetero-kv is tested with; `pip install --no-deps kvpress` beside its other
requirements (cachetools, fire, datasets, peft, pandas) runs the presses used here.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import cpu_ops  # noqa: F401  before torch, for it sets how OpenMP waits

# isort: split
try:
    # Before hetero_kv: it wraps every attention function that is registered by then, and calls them as its own need.
    import kvpress
except ImportError:
    kvpress = None

# isort: split
import torch
from transformers import DynamicCache

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals import CallableSubject, ConfiguredModel, RunOptions, Sample, config_specs, run
from hetero_kv.evals.options import parse_depth, parse_length, parse_list
from hetero_kv.evals.subject import Subject
from hetero_kv.models import DEFAULT_MODEL, load_model

WINDOW = 64

#: kvpress' side of a budget: class -> what it takes beside the share of the tokens to drop. With the paper's beta of 20
#: the press silently becomes SnapKV where its last layer would keep less than the window, below 1,280 tokens; the
#: greatest beta at which it is a pyramid is taken.
PRESSES: dict[str, Callable[[int], dict[str, int]]] = {
    "SnapKVPress": lambda budget: {},
    "PyramidKVPress": lambda budget: {"beta": min(20, budget // WINDOW)},
    "TOVAPress": lambda budget: {},
    "StreamingLLMPress": lambda budget: {},
}

#: hetero-kv's side of a budget: recipe -> settings with which a step attends to that many tokens.
RECIPES: dict[str, Callable[[int], dict[str, int]]] = {
    "snapkv": lambda budget: {
        "local_windows_len": WINDOW,
        "preselect_block_count": budget - WINDOW,
        "second_block_count": budget - WINDOW,
    },
    "quest": lambda budget: {"second_block_count": (budget - WINDOW - 16) // 16, "dense_layer_num": 0},
    "ktransformers": lambda budget: {
        "block_size": 32,
        "initial_len": 32,
        "local_windows_len": WINDOW,
        "second_block_count": (budget - WINDOW - 32) // 32,
    },
    "streaming": lambda budget: {"local_windows_len": budget - 4},
}


class PressedModel:
    """A model whose prompts kvpress reduces to a budget, as the harness asks for it: a sample in, answers out.

    Args:
        press: name of a class of kvpress that takes a `compression_ratio`.
        budget: tokens of the prompt that are kept per layer.
    """

    def __init__(self, configured: ConfiguredModel, press: str, budget: int) -> None:
        self.configured = configured
        self.model: Any = configured.loaded.model
        self.press = press
        self.budget = budget

    @torch.no_grad()
    def __call__(self, sample: Sample) -> list[str]:
        """Greedy answers, one per turn; the prompt is reduced once, later turns are added to what was kept."""
        prompt = self.configured.prompt(sample).tokens
        self._cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        logits, self._position = self._prefilled(prompt), len(prompt)
        answers: list[str] = []
        tokens: list[int] = []
        for question in sample.turns:
            if tokens:
                following = self.configured.turns.following(question, tokens[-1])
                logits = self._fed([tokens[-1], *following, *self.configured.encoded(sample.answer_prefix)])
            tokens = [int(logits.argmax())]
            while tokens[-1] not in self.configured.ends and len(tokens) < sample.max_new_tokens:
                tokens.append(int(self._fed(tokens[-1:]).argmax()))
            answers.append(self.configured.loaded.tokenizer.decode(tokens, skip_special_tokens=True))
        return answers

    def _prefilled(self, prompt: Sequence[int]) -> torch.Tensor:
        tokens = len(prompt)
        # Half a token more, so that rounding down keeps the budget.
        ratio = max(0.0, 1 - (self.budget + 0.5) / tokens)
        press = getattr(kvpress, self.press)(compression_ratio=ratio, **PRESSES[self.press](self.budget))
        with press(self.model):
            return self.model(
                input_ids=torch.tensor([list(prompt)], device=self.model.device),
                past_key_values=self._cache,
                # Newer versions of transformers do not pass it on by themselves; the presses look for it.
                cache_position=torch.arange(tokens, device=self.model.device),
                logits_to_keep=1,
            ).logits[:, -1]

    def _fed(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits after tokens that are fed one by one: layers of different lengths have no mask in common."""
        for token in tokens:
            positions = torch.tensor([[self._position]], device=self.model.device)
            ids = torch.tensor([[token]], device=self.model.device)
            logits = self.model(input_ids=ids, past_key_values=self._cache, position_ids=positions).logits[:, -1]
            self._position += 1
        return logits


def pressed_subjects(configured: ConfiguredModel, budgets: Sequence[int]) -> Iterator[CallableSubject]:
    """A subject per press and budget."""
    for budget in budgets:
        for press in PRESSES:
            yield CallableSubject(
                f"kvpress {press.removesuffix('Press')} {budget}",
                PressedModel(configured, press, budget),
                settings={
                    "press": press,
                    "budget": budget,
                    **PRESSES[press](budget),
                    "kvpress": metadata.version("kvpress"),
                },
                attended=partial(min, budget),
            )


def recipe_words(budgets: Sequence[int]) -> list[str]:
    """hetero-kv's recipes at the budgets, as `--config` spells them."""
    return [
        ":".join((recipe, *(f"{name}={value}" for name, value in settings(budget).items())))
        for budget in budgets
        for recipe, settings in RECIPES.items()
    ]


def main() -> None:
    """Run it, and print the mean scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the run")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--task", default="needle,passkey,multi_turn_needle")
    parser.add_argument("--budgets", default="256,512", help="tokens attended per layer; 160 or more")
    parser.add_argument("--lengths", default="2k")
    parser.add_argument("--depths", default="0,25,50,75,100")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--haystack", type=Path)
    arguments = parser.parse_args()
    if kvpress is None:
        sys.exit("kvpress is not installed: pip install 'hetero-kv[bench]', or see the head of this file")
    try:
        compare(arguments)
    except HeteroKVError as error:
        sys.exit(f"error: {error}")


def compare(arguments: argparse.Namespace) -> None:
    """Run the comparison that the flags ask for."""
    budgets = parse_list(arguments.budgets, parse_length, "budgets")
    if min(budgets) < 160:
        raise HeteroKVError(f"budgets has {min(budgets)}; the windows alone take 96, give 160 or more")
    options = RunOptions(
        lengths=parse_list(arguments.lengths, parse_length, "lengths"),
        depths=parse_list(arguments.depths, parse_depth, "depths"),
        samples=arguments.samples,
        seed=arguments.seed,
        haystack=arguments.haystack,
    )
    configured = ConfiguredModel(
        load_model(arguments.model, dtype=arguments.dtype), config_specs(recipe_words(budgets))
    )
    subjects: list[Subject] = [configured, *pressed_subjects(configured, budgets)]
    command = shlex.join(("python", "-m", "benchmarks.quality_vs_kvpress", *sys.argv[1:]))
    done = run(arguments.task.split(","), subjects, arguments.out, options, command_line=command)
    attended = done.summary["attended_tokens"]
    for task, of_task in done.summary["tasks"].items():
        print(f"\n{task}: mean score, tokens attended at each length")
        for method, found in of_task.items():
            budget = ", ".join(f"{tokens:.0f}" for tokens in attended.get(method, {}).values())
            print(f"  {found['score']:.3f}  {method}  ({budget})")
    print(f"\n{arguments.out / 'report.md'}")


if __name__ == "__main__":
    main()
