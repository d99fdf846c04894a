"""GPU work per decoded token and layer: kernel launches, waits of the host, copies over the bus.

    python -m tests.support.launch_counts [RECIPE ...]

Counted on a simulated device (`simulated_cuda`), with a tiny Llama in bfloat16, as a mean over decoded tokens. A
kernel's launch and a wait cost microseconds whatever the model's size; nothing here says how many.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from hetero_kv import eject
from hetero_kv.rules.rule_set import RuleSet
from tests.support.devices import simulated_cuda
from tests.support.simulated_cuda import Record
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model

RECIPES = ("ktransformers", "quest", "adaptive", "shadowkv", "streaming_llm", "h2o", "tova")
#: Those that a GPU attends to by itself.
RESIDENT = ("quest",)
PROMPT, TOKENS = 120, 16
_FIRST = 4
#: Counts of the untouched models so far.
_untouched: dict[str, Counts] = {}


@dataclass(frozen=True)
class Counts:
    """Of a decoded token and layer, means.

    Attributes:
        launches: kernels.
        pinned, pageable: copies between DRAM and the device whose host side is page-locked, or is not.
    """

    launches: float
    waits: float
    pinned: float
    pageable: float

    @classmethod
    def of(cls, record: Record, layers: int, tokens: int) -> Counts:
        """Of what has been recorded while so many tokens were decoded."""
        pageable = len(record.pageable)
        counted = len(record.launches), len(record.waits), len(record.copies) - pageable, pageable
        return cls(*(count / layers / tokens for count in counted))

    def beyond(self, other: Counts) -> Counts:
        """What is more than another's."""
        return Counts(*(mine - theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


def stored_as_shipped(rules: RuleSet) -> RuleSet:
    """The rules with keys and values in FP16, which `small_recipe` stores in the computed precision."""
    half = {"kv_type": "FP16", "value_type": "FP16"}
    changed = (
        replace(rule, kwargs={name: half.get(name, value) for name, value in rule.kwargs.items()})
        for rule in rules.rules
    )
    return replace(rules, rules=tuple(changed))


@torch.no_grad()
def decoded(model: Any, cache: Any, record: Record, tokens: int) -> Counts:
    """Counts of as many tokens decoded behind a prompt."""
    lengths = [PROMPT, *[1] * (tokens + _FIRST)]
    ids = torch.randint(2, 97, (1, sum(lengths)), generator=torch.Generator().manual_seed(0)).to("cuda")
    parts = ids.split(lengths, dim=1)
    # The first tokens have the calls bound and captured, and what is tried once is tried.
    for part in parts[: 1 + _FIRST]:
        model(part, past_key_values=cache)
    # What was let go of before is unlocked now, and not while waits are counted.
    gc.collect()
    record.clear()
    for part in parts[1 + _FIRST :]:
        model(part, past_key_values=cache)
    return Counts.of(record, model.config.num_hidden_layers, tokens)


def counts_of(
    recipes: tuple[str, ...],
    as_shipped: bool = True,
    architecture: str = "llama",
    cuda_graphs: str = "off",
    tokens: int = TOKENS,
    attend_on: str = "cpu",
    index_device: str = "auto",
    **shape: Any,
) -> dict[str, Counts]:
    """Of the untouched model, under "untouched", and of what each recipe asks beyond that.

    With `cuda_graphs` most of what the untouched model asks is in graphs, so that launches beyond are fewer than none.

    as_shipped: store keys and values in FP16, not in the computed precision, whose kernels other tests compile.
    tokens: how many are decoded, a multiple of what happens every so many tokens: blocks are closed, strides pass.
    architecture, shape: of the tiny model.
    """
    # What is there already stays: collections below, one for each recipe, need not look at it.
    gc.collect()
    gc.freeze()
    with simulated_cuda() as gpu:
        model = tiny_model(architecture, **shape).to(torch.bfloat16).to("cuda")
        key = f"{architecture} {shape} {tokens}"
        if key not in _untouched:
            _untouched[key] = decoded(model, DynamicCache(config=model.config), gpu.record, tokens)
        found = {"untouched": _untouched[key]}
        for recipe in recipes:
            rules = small_recipe(recipe, cuda_graphs=cuda_graphs, attend_on=attend_on, index_device=index_device)
            rules = stored_as_shipped(rules) if as_shipped else rules
            found[recipe] = decoded(model, injected(model, rules), gpu.record, tokens).beyond(found["untouched"])
            eject(model)
        # What is page-locked is released while there is a device.
        gc.collect()
    return found


def table(found: dict[str, Counts]) -> str:
    """The counts, in Markdown."""
    lines = ["| per layer and decoded token | launches | waits | pinned copies | pageable copies |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, counts in found.items():
        numbers = (f"{number:.1f}" for number in vars(counts).values())
        lines.append(f"| {name if name == 'untouched' else f'{name}, beyond that'} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def captured_table(found: dict[str, Counts]) -> str:
    """All launches of a layer, with what lies between attentions captured, in Markdown."""
    lines = ["| per layer and decoded token, captured | launches in all, graphs among them |", "|---|---:|"]
    untouched = found.pop("untouched")
    lines += [f"| {name} | {counts.launches + untouched.launches:.1f} |" for name, counts in found.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    chosen = tuple(sys.argv[1:]) or RECIPES
    for written, graphs in ((table, "off"), (captured_table, "auto")):
        counted = counts_of(chosen, cuda_graphs=graphs)
        on_gpu = counts_of(tuple({*chosen} & {*RESIDENT}), cuda_graphs=graphs, attend_on="gpu")
        counted |= {f"{name}, attend_on: gpu": counts for name, counts in on_gpu.items() if name != "untouched"}
        print(written(counted), end="\n\n")
