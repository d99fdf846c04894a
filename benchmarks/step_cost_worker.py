"""The worker of `benchmarks.step_cost` for one tree: it reads requests and writes measurements, as JSON lines.

    PYTHONPATH=TREE:BENCHMARKS python -P step_cost_worker.py TREE LAYERS

The same program runs on both trees, so it only uses the public `from hetero_kv import HeteroCache, eject, inject`, and
no internals. `step_cost.py` explains the measurements.

Requests: {"do": "inject", "recipe": name, "settings": {…}, "prompt": tokens}, then any number of {"do": "burst"},
{"do": "frames"} and {"do": "attribution"}, each with "tokens", of the last injected recipe.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

# Import this before torch: importing a tree's kernels sets how long OpenMP threads spin.
from hetero_kv import HeteroCache, eject, inject  # isort: skip

import torch
from numba.core.registry import CPUDispatcher
from step_cost_profile import PACKAGE, Attribution, FrameCount, clock, counted
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

VOCABULARY = 97
CAPACITY = 4096


class KernelTimer:
    """Sums the seconds in compiled functions of all callers; calls between compiled functions are native."""

    def __init__(self) -> None:
        self.seconds = 0.0
        compiled, timer = CPUDispatcher.__call__, self

        def timed(dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = compiled(dispatcher, *args, **kwargs)
            timer.seconds += clock() - start
            return result

        self.code = timed.__code__
        CPUDispatcher.__call__ = timed

    def take(self) -> float:
        """Seconds since the last call of `take`."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class StoresNothing(CacheLayerMixin):
    """A cache layer that stores no tokens."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Initialise nothing."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The new keys and values only."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """No token is stored."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that a mask spans, and the number of keys before them."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


def _zeros(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register("zeros", _zeros)
AttentionMaskInterface.register("zeros", AttentionMaskInterface()["sdpa"])


def tiny_llama(layers: int, attention: str) -> LlamaForCausalLM:
    """A random Llama of tiny dimensions, always the same."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CAPACITY,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


class StepCostSubject:
    """A model with a recipe injected and a prompt in its cache, and the untouched model."""

    def __init__(self, tree: Path, layers: int) -> None:
        self.folders = (f"{tree / PACKAGE}/",)
        self.kernels = KernelTimer()
        self.untouched, self.model = tiny_llama(layers, "zeros"), tiny_llama(layers, "sdpa")
        self.nothing = Cache(layers=[StoresNothing() for _ in range(layers)])
        self.injected = False

    def inject(self, recipe: str, settings: dict[str, Any], prompt: int) -> dict[str, Any]:
        """Inject a recipe, prefill a random prompt, and compile all kernels."""
        if self.injected:
            eject(self.model)
        inject(self.model, recipe, command_line={**settings, "threads_num": 1, "max_seq_len": CAPACITY})
        self.injected = True
        self.cache = HeteroCache(self.model)
        self.draw = torch.Generator().manual_seed(0)
        self.model(self._tokens(prompt), past_key_values=self.cache, logits_to_keep=1)
        gc.collect()
        gc.freeze()
        return {}

    def burst(self, tokens: int) -> dict[str, float]:
        """Mean milliseconds per token; the untouched model decodes a token after each of the injected model's."""
        total = kernels = own = 0.0
        for token in self._tokens(tokens).split(1, dim=1):
            self.kernels.take()
            start = clock()
            self.model(token, past_key_values=self.cache)
            total += clock() - start
            kernels += self.kernels.take()
            start = clock()
            self.untouched(token, past_key_values=self.nothing)
            own += clock() - start
        found = {"total": total, "kernels": kernels, "untouched": own, "host": total - kernels - own}
        return {name: seconds / tokens * 1e3 for name, seconds in found.items()}

    def frames(self, tokens: int) -> dict[str, Any]:
        """Python frames entered per token: the project's by name, inside and outside decoder layers, and others'."""
        counts = [FrameCount(self.model.model.layers) for _ in range(tokens)]
        for token, count in zip(self._tokens(tokens).split(1, dim=1), counts, strict=True):
            with counted(count):
                self.model(token, past_key_values=self.cache)
        own = FrameCount(self.untouched.model.layers)
        with counted(own):
            self.untouched(token, past_key_values=self.nothing)
        names = sum((count.ours for count in counts), Counter())
        called = sum((count.called for count in counts), Counter())
        return {
            "per_token": [count.ours.total() for count in counts],
            "outside_layers": [count.ours.total() - count.in_layers for count in counts],
            "others": [count.others - own.others for count in counts],
            "calls": {name: number / tokens for name, number in names.most_common()},
            "called": {name: number / tokens for name, number in called.most_common()},
        }

    def attribution(self, tokens: int) -> dict[str, float]:
        """Milliseconds per token by owner, without the profiler's overhead; see Attribution."""
        plain, attribution = 0.0, Attribution(self.folders, self.kernels.code)
        for token, profiled_token in self._tokens(2 * tokens).view(tokens, 2, 1, 1):
            start = clock()
            self.model(token, past_key_values=self.cache)
            plain += clock() - start
            with attribution.profile:
                self.model(profiled_token, past_key_values=self.cache)
        return {name: seconds / tokens * 1e3 for name, seconds in attribution.seconds(plain).items()}

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (1, count), generator=self.draw)


def main() -> None:
    """Answer requests until there are no more."""
    tree, layers = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    found = Path(str(sys.modules[PACKAGE].__file__)).resolve()
    if not found.is_relative_to(tree):
        sys.exit(f"{PACKAGE} was imported from {found}, not from {tree}; run with PYTHONPATH={tree}")
    # Libraries' output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    subject = StepCostSubject(tree, layers)
    with torch.no_grad():
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(subject, request.pop("do"))(**request)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
