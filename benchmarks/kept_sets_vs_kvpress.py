"""Compares the prompt tokens that fixed-memory recipes keep with those of kvpress's presses of the same methods.

    python -m benchmarks.kept_sets_vs_kvpress --haystack FILE [--model smollm2-135m-instruct] [--budgets 256,512]
        [--length 2k] [--methods TOVA,SnapKV] [--json FILE]

A text is prefilled once per recipe, and once by the untouched model with all presses attached: kvpress scores and
chooses in every layer from the hidden states of full attention, and nothing is dropped. Per method and budget: the
share of tokens that both keep, as a mean over kv heads in the lower, middle and upper third of the layers and in all
layers, and the lowest of any kv head; the number of equal (layer, kv head) sets; and for unequal ones, the largest
difference between the scores of exchanged tokens (`Overlap.spread`).

A press processes a prompt as a whole. So does a recipe here, with a stride that covers the prompt, except for methods
called "strided", which are the recipes with their defaults. PyramidKV has the same budget in every layer on both sides;
"same beta" has the same setting, which the two interpret differently.

`benchmarks.quality_vs_kvpress` lists the packages to install.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before hetero_kv, because of kvpress.
from benchmarks.quality_vs_kvpress import PRESSES, WINDOW, chosen, kvpress, press_at, pressed_prefill, word

# isort: split
import torch
from transformers import DynamicCache

from benchmarks.kept_sets import Overlap, overlap, row
from hetero_kv.errors import HeteroKVError
from hetero_kv.evals import ConfiguredModel, config_specs
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.options import parse_length, parse_list
from hetero_kv.evals.prompt import Prompt
from hetero_kv.models import DEFAULT_MODEL, load_model


@dataclass(frozen=True)
class Method:
    """A recipe and a press of one method.

    Attributes:
        recipe: the rules file.
        settings: (budget, prompt length) -> the recipe's settings besides its budget.
        press: the class of kvpress.
        press_settings: budget -> the press's settings besides the share to drop; None for those in PRESSES.
    """

    recipe: str
    press: str
    settings: Callable[[int, int], dict[str, float]] = lambda budget, tokens: {}
    press_settings: Callable[[int], dict[str, int]] = lambda budget: {}


def _same_pyramid(budget: int, tokens: int) -> dict[str, float]:
    """The beta with which the top layer keeps as much as the press leaves it with `_gentle`; the mean is the same.

    The recipe distributes the budget left by the windows, the press the whole budget.
    """
    top = budget / _gentle(budget)["beta"]
    return {"recent_tokens": WINDOW, "beta": (budget - WINDOW) / (top - WINDOW)}


def _gentle(budget: int) -> dict[str, int]:
    """The largest beta of the press with which its top layer keeps more than the window."""
    return {"beta": max(1, budget // (2 * WINDOW))}


METHODS = {
    "StreamingLLM": Method(
        "streaming_llm", "StreamingLLMPress", lambda budget, tokens: {"sink_tokens": 4, "stride": tokens}
    ),
    "StreamingLLM strided": Method("streaming_llm", "StreamingLLMPress"),
    "TOVA": Method("tova", "TOVAPress", lambda budget, tokens: {"stride": tokens}),
    "TOVA strided": Method("tova", "TOVAPress"),
    "SnapKV": Method("snapkv_evict", "SnapKVPress", lambda budget, tokens: {"recent_tokens": WINDOW, "kernel_size": 5}),
    "PyramidKV": Method("pyramidkv", "PyramidKVPress", _same_pyramid, _gentle),
    "PyramidKV same beta": Method(
        "pyramidkv",
        "PyramidKVPress",
        lambda budget, tokens: {"recent_tokens": WINDOW, **PRESSES["PyramidKVPress"](budget)},
    ),
}


@dataclass
class PressRecording:
    """The positions that a press chose, layer by layer.

    Attributes:
        positions: layer -> [kv_heads, kept] int64, ascending.
        scores: layer -> [kv_heads, length].
    """

    positions: dict[int, torch.Tensor] = field(default_factory=dict)
    scores: dict[int, torch.Tensor] = field(default_factory=dict)


def recorded(press: Any) -> PressRecording:
    """Record what a press chooses during a prefill, without dropping anything.

    The press gathers keys and values by the same indices and does not score values, so it gets positions in place of
    values.
    """
    recording, compress, score = PressRecording(), press.compress, press.score

    def choose(module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        places = torch.arange(keys.shape[2], device=keys.device, dtype=torch.float64)[:, None].expand(values.shape)
        _, kept = compress(module, hidden_states, keys, places, attentions, kwargs)
        recording.positions[module.layer_idx] = kept[0, :, :, 0].long().sort(dim=-1).values
        return keys, values

    def note(module: Any, *arguments: Any) -> torch.Tensor:
        found = score(module, *arguments)
        recording.scores[module.layer_idx] = found[0]
        return found

    press.compress, press.score = choose, note
    return recording


def kept_by_presses(model: Any, prompt: Sequence[int], presses: Sequence[Any]) -> list[PressRecording]:
    """What each press chooses of a prompt, from one prefill for all."""
    recordings = [recorded(press) for press in presses]
    pressed_prefill(model, prompt, DynamicCache(config=model.config.get_text_config(decoder=True)), *presses)
    return recordings


def kept_by_recipe(configured: ConfiguredModel, method: str, prompt: Sequence[int]) -> list[torch.Tensor]:
    """Positions that a configured method keeps after a prompt: per layer, [kv_heads, kept] int64."""
    with configured.prefilled(method, Prompt(prompt, len(prompt) + 1)) as ready:
        return [layer.entries.positions[0] for layer in ready.cache.layers]


def compare(
    model_name: str, dtype: str, methods: Sequence[str], budgets: Sequence[int], length: int, haystack: Haystack
) -> list[dict[str, Any]]:
    """A row for each method and budget, printed as soon as it is measured.

    Raises HeteroKVError for a budget that covers the prompt, so that nothing would be dropped.
    """
    if not 160 <= min(budgets) <= max(budgets) < length:
        raise HeteroKVError(
            f"budgets has {min(budgets)} to {max(budgets)}; give 160 or more, and less than the {length} tokens of the "
            "prompt"
        )
    loaded = load_model(model_name, dtype=dtype)
    # As many words have as many tokens at least.
    prompt = loaded.tokenizer(haystack.separator.join(haystack.take(length)))["input_ids"][:length]
    cases = [(name, budget) for name in methods for budget in budgets]
    words = {
        (name, budget): word(METHODS[name].recipe, {"budget": budget, **METHODS[name].settings(budget, len(prompt))})
        for name, budget in cases
    }
    configured = ConfiguredModel(loaded, config_specs(list(dict.fromkeys(words.values()))), baseline=False)
    presses = [
        press_at(METHODS[name].press, budget, len(prompt), **METHODS[name].press_settings(budget))
        for name, budget in cases
    ]
    rows = []
    for case, theirs in zip(cases, kept_by_presses(loaded.model, prompt, presses), strict=True):
        ours = kept_by_recipe(configured, words[case], prompt)
        layers: list[Overlap] = [
            overlap(own, theirs.positions[index], theirs.scores[index]) for index, own in enumerate(ours)
        ]
        rows.append(
            {"method": case[0], "budget": case[1], "recipe": words[case], "tokens": len(prompt), **row(layers)}
            | {"shares": [layer.shares for layer in layers], "kept_by_layer": [layer.kept for layer in layers]}
        )
        print(_line(rows[-1]), flush=True)
    return rows


_HEAD = (
    "| method | budget | kept, ours / theirs | lower | middle | upper | mean | lowest | equal sets | spread |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def _line(row: dict[str, Any]) -> str:
    shares = " | ".join(f"{row[name]:.1%}" for name in ("lower", "middle", "upper", "mean", "lowest"))
    kept = " / ".join(f"{tokens:.1f}" for tokens in row["kept"])
    equal = f"{row['equal']} of {row['sets']}"
    return f"| {row['method']} | {row['budget']} | {kept} | {shares} | {equal} | {row['spread']:.1e} |"


def main() -> None:
    """Print the table; write the figures of every layer and kv head with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", help="with less, rounding changes more of the order")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--budgets", default="256,512", help="tokens kept per layer; 160 or more")
    parser.add_argument("--length", default="2k", type=parse_length, help="of the prompt, tokens")
    parser.add_argument("--haystack", type=Path, help="a text; RULER's noise sentences without")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if kvpress is None:
        sys.exit("kvpress is not installed: pip install 'hetero-kv[bench]', or see benchmarks/quality_vs_kvpress.py")
    try:
        haystack = Haystack.from_file(arguments.haystack) if arguments.haystack else Haystack.noise()
        methods = chosen(arguments.methods, METHODS, "methods")
        budgets = parse_list(arguments.budgets, parse_length, "budgets")
        print(f"{arguments.model}, {arguments.dtype}, {arguments.length} tokens of {haystack.name}\n\n{_HEAD}")
        rows = compare(arguments.model, arguments.dtype, methods, budgets, arguments.length, haystack)
    except HeteroKVError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
