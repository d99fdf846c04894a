"""Compares retrieval quality with kvpress at equal budgets, on the same samples and with the same harness.

    python -m benchmarks.quality_vs_kvpress --out DIR [--budgets 256,512] [--task needle,passkey] [--lengths 2k]
        [--recipes snapkv_evict,pyramidkv,tova,streaming_llm] [--presses SnapKV,PyramidKV,TOVA,StreamingLLM]

A budget is the number of prompt tokens that a step attends to in every layer (the mean over layers for PyramidKV).
kvpress prefills the whole prompt, including the question, and drops all but the budget once. hetero-kv's `snapkv_evict`
and `pyramidkv` do the same; `tova` and `streaming_llm` drop after every stride of a prompt; its other recipes keep
everything and choose the budget's tokens. Generated tokens are extra in kvpress, and part of the budget in hetero-kv.
`benchmarks.kept_sets_vs_kvpress` compares the kept tokens.

The same command continues a stopped run.

kvpress pins an older transformers than hetero-kv is tested with. To run the presses used here, install it with
`pip install --no-deps kvpress` and its other requirements (cachetools, fire, datasets, peft, pandas).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import hetero_kv.cpu_ops  # noqa: F401  before torch, for it sets how OpenMP waits

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

#: kvpress at a budget: class -> its settings besides the share of tokens to drop. With the paper's beta of 20 the press
#: silently becomes SnapKV if its last layer would keep less than the window, below 1,280 tokens; so this is the largest
#: beta that keeps a pyramid.
PRESSES: dict[str, Callable[[int], dict[str, int]]] = {
    "SnapKVPress": lambda budget: {},
    "PyramidKVPress": lambda budget: {"beta": min(20, budget // WINDOW)},
    "TOVAPress": lambda budget: {},
    "StreamingLLMPress": lambda budget: {},
}

#: Name of a press in flags and tables -> class.
PRESS_NAMES = {press.removesuffix("Press"): press for press in PRESSES}

#: hetero-kv at a budget: recipe -> settings with which a step attends to that many tokens. The first four evict like
#: the presses, PyramidKV with the press's beta.
RECIPES: dict[str, Callable[[int], dict[str, int | str]]] = {
    "snapkv_evict": lambda budget: {"budget": budget, "recent_tokens": WINDOW},
    "pyramidkv": lambda budget: {"budget": budget, "recent_tokens": WINDOW, **PRESSES["PyramidKVPress"](budget)},
    "tova": lambda budget: {"budget": budget},
    "streaming_llm": lambda budget: {"budget": budget},
    "snapkv": lambda budget: {
        "local_windows_len": WINDOW,
        "preselect_block_count": budget - WINDOW,
        "top_k_blocks": budget - WINDOW,
    },
    "quest": lambda budget: {"top_k_blocks": (budget - WINDOW - 16) // 16, "dense_layer_num": 0},
    "ktransformers": lambda budget: {
        "block_size": 32,
        "sink_tokens": 32,
        "local_windows_len": WINDOW,
        "top_k_blocks": (budget - WINDOW - 32) // 32,
    },
    "streaming": lambda budget: {"local_windows_len": budget - 4},
    "adaptive": lambda budget: {
        "top_k_blocks": (budget - WINDOW - 16) // 16,
        "target_mass": "none",
        "min_blocks": 1,
    },
}


def press_at(press: str, budget: int, tokens: int, **settings: int) -> Any:
    """A press that keeps `budget` of a prompt's `tokens` per layer.

    Args:
        press: name of a class of kvpress that takes a `compression_ratio`.
        settings: win over those in PRESSES.
    """
    # A bit more, so that rounding down keeps the budget, and too little to round a layer of PyramidKV up.
    ratio = max(0.0, 1 - (budget + 1e-3) / tokens)
    return getattr(kvpress, press)(compression_ratio=ratio, **{**PRESSES[press](budget), **settings})


@torch.no_grad()
def pressed_prefill(model: Any, prompt: Sequence[int], cache: DynamicCache, *presses: Any) -> torch.Tensor:
    """Prefill a prompt with presses at work; the logits after its last token, [1, vocab]."""
    with ExitStack() as active:
        for press in presses:
            active.enter_context(press(model))
        return model(
            input_ids=torch.tensor([list(prompt)], device=model.device),
            past_key_values=cache,
            # Newer versions of transformers do not pass it on by themselves; the presses look for it.
            cache_position=torch.arange(len(prompt), device=model.device),
            logits_to_keep=1,
        ).logits[:, -1]


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
        press = press_at(self.press, self.budget, len(prompt))
        logits, self._position = pressed_prefill(self.model, prompt, self._cache, press), len(prompt)
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

    def _fed(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits after tokens that are fed one by one: layers of different lengths have no mask in common."""
        for token in tokens:
            positions = torch.tensor([[self._position]], device=self.model.device)
            ids = torch.tensor([[token]], device=self.model.device)
            logits = self.model(input_ids=ids, past_key_values=self._cache, position_ids=positions).logits[:, -1]
            self._position += 1
        return logits


def pressed_subjects(
    configured: ConfiguredModel, presses: Sequence[str], budgets: Sequence[int]
) -> Iterator[CallableSubject]:
    """A subject per press and budget."""
    for budget in budgets:
        for press in presses:
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


def recipe_words(recipes: Sequence[str], budgets: Sequence[int]) -> list[str]:
    """hetero-kv's recipes at the budgets, as `--config` spells them."""
    return [word(recipe, RECIPES[recipe](budget)) for budget in budgets for recipe in recipes]


def word(recipe: str, settings: Mapping[str, object]) -> str:
    """A recipe with settings, as `--config` spells it."""
    return ":".join((recipe, *(f"{name}={value}" for name, value in settings.items())))


def chosen(text: str, known: Iterable[str], flag: str) -> list[str]:
    """The names in a list that is written with commas; none for "none".

    Raises HeteroKVError for a name that is not among `known`.
    """
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise HeteroKVError(f"{flag} has {unknown[0]!r}; give some of {', '.join(known)}, or none")
    return names


def main() -> None:
    """Run it, and print the mean scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the run")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--task", default="needle,passkey,multi_turn_needle")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="hetero-kv's methods; none: only kvpress's")
    parser.add_argument("--presses", default=",".join(PRESS_NAMES), help="kvpress's methods; none: only hetero-kv's")
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
    recipes = chosen(arguments.recipes, RECIPES, "recipes")
    presses = [PRESS_NAMES[name] for name in chosen(arguments.presses, PRESS_NAMES, "presses")]
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
        load_model(arguments.model, dtype=arguments.dtype), config_specs(recipe_words(recipes, budgets))
    )
    subjects: list[Subject] = [configured, *pressed_subjects(configured, presses, budgets)]
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
