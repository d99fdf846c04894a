"""One tree's side of `benchmarks.step_cost`: measures on request, a line of JSON in and a line of JSON out.

    PYTHONPATH=TREE python -P step_cost_worker.py TREE LAYERS

The same text runs over both trees, so that it uses what every tree has, `from hetero_kv import HeteroCache, eject,
inject`, and knows nothing of where a tree keeps its internals. What is measured, and why so, stands in `step_cost.py`.

Requests: {"do": "inject", "recipe": name, "settings": {…}, "prompt": tokens}, then any number of {"do": "burst"},
{"do": "frames"} and {"do": "attribution"}, each with "tokens", of the last injected recipe.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before torch: importing a tree's kernels says how long OpenMP threads spin.
from hetero_kv import HeteroCache, eject, inject  # isort: skip

import torch
from numba.core.registry import CPUDispatcher
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

PACKAGES = ("hetero_kv", "cpu_ops", "gpu_ops")
VOCABULARY = 97
CAPACITY = 4096
#: Owners of time that is not ours.
MODEL, KERNELS = "(model)", "(kernels)"

# CPU time of the only thread that computes: what other programs take from the machine in between is not in it.
clock = time.thread_time


class KernelTimer:
    """Adds up the seconds in compiled functions, wherever they are called from; calls among themselves are native."""

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
        """Seconds since it was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class StoresNothing(CacheLayerMixin):
    """A cache layer of any number of tokens that keeps none of them."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to initialise."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The new keys and values, alone."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """No token is stored."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask spans, and how many lie before them."""
        return query_length, 0

    def get_max_length(self) -> int:
        """There is no limit."""
        return -1


def _zeros(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register("zeros", _zeros)
AttentionMaskInterface.register("zeros", AttentionMaskInterface()["sdpa"])


def tiny_llama(layers: int, attention: str) -> LlamaForCausalLM:
    """A random Llama of tiny dimensions, the same whenever it is asked for."""
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


class Subject:
    """A model with a recipe injected and a prompt in its cache, beside the untouched one."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.kernels = KernelTimer()
        self.untouched, self.model = tiny_llama(layers, "zeros"), tiny_llama(layers, "sdpa")
        self.nothing = Cache(layers=[StoresNothing() for _ in range(layers)])
        self.injected = False

    def inject(self, recipe: str, settings: dict[str, Any], prompt: int) -> dict[str, Any]:
        """Inject a recipe and prefill a random prompt; what is compiled on first use is compiled after it."""
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
        """Mean milliseconds per token, the untouched model decoding one after each of the injected one's."""
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
        """Python frames entered per token: ours by name, within decoder layers and outside, and other people's."""
        counts = [FrameCount(self.model.model.layers) for _ in range(tokens)]
        for token, count in zip(self._tokens(tokens).split(1, dim=1), counts, strict=True):
            with profiled(count):
                self.model(token, past_key_values=self.cache)
        own = FrameCount(self.untouched.model.layers)
        with profiled(own):
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
        """Milliseconds per token by owner, the profiler's own taken out; see Attribution."""
        plain, spent = 0.0, Attribution(self.kernels)
        for token, profiled_token in self._tokens(2 * tokens).view(tokens, 2, 1, 1):
            start = clock()
            self.model(token, past_key_values=self.cache)
            plain += clock() - start
            spent.resume()
            with profiled(spent):
                self.model(profiled_token, past_key_values=self.cache)
        return {name: seconds / tokens * 1e3 for name, seconds in spent.without_profiler(plain).items()}

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (1, count), generator=self.draw)


class FrameCount:
    """A profile function that counts the frames entered; resuming a generator enters its frame again."""

    def __init__(self, layers: Any) -> None:
        self._layers = {id(layer) for layer in layers}
        self._inside = [False]
        self.ours: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.in_layers = self.others = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """Take an event of `sys.setprofile`."""
        if event == "call":
            inside = self._inside[-1] or id(frame.f_locals.get("self")) in self._layers
            self._inside.append(inside)
            if _is_ours(frame):
                self.ours[_name(frame)] += 1
                self.in_layers += inside
                return
            # Not this file's either.
            self.others += frame.f_globals is not globals()
            if frame.f_back is not None and _is_ours(frame.f_back):
                self.called[_name(frame)] += 1
        elif event == "return" and len(self._inside) > 1:
            self._inside.pop()
        elif event == "c_call" and _is_ours(frame):
            self.called[getattr(arg, "__qualname__", repr(arg))] += 1


class Attribution:
    """A profile function that adds up seconds by who asked for them.

    A frame of ours owns the time in it and in all that it calls, C functions and other people's frames alike, up to
    the next frame of ours, a compiled kernel, or a module of the model. So do the calls of modules that stand in the
    place of others, and `torch.no_grad` as a decorator, which the untouched model has none of within its layers.
    """

    def __init__(self, kernels: KernelTimer) -> None:
        self._kernel_code = kernels.code
        self._owners = [MODEL]
        self._last = clock()
        self.seconds: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """Take an event of `sys.setprofile`."""
        self.seconds[self._owners[-1]] += clock() - self._last
        self.events[self._owners[-1]] += 1
        if event == "call":
            self._owners.append(self._owner(frame) or self._owners[-1])
        elif event == "return" and len(self._owners) > 1:
            self._owners.pop()
        self._last = clock()

    def resume(self) -> None:
        """Time since the last event is nobody's."""
        self._last = clock()

    def without_profiler(self, plain: float) -> Counter[str]:
        """Seconds by owner that add up to `plain`, what the same took unprofiled: every event costs as much."""
        event = (self.seconds.total() - plain) / self.events.total()
        return Counter({name: seconds - self.events[name] * event for name, seconds in self.seconds.items()})

    def _owner(self, frame: Any) -> str | None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if _is_ours(frame):
            return _name(frame)
        if frame.f_code is self._kernel_code:
            return KERNELS
        if module == "torch.nn.modules.module" and name in ("_wrapped_call_impl", "_call_impl"):
            replaced = type(frame.f_locals["self"]).__module__.partition(".")[0] in PACKAGES
            return "torch: calls of our modules" if replaced else MODEL
        if module == "torch.utils._contextlib":
            return "torch: no_grad as a decorator"
        return MODEL if module.startswith("transformers.models.") else None


def _is_ours(frame: Any) -> bool:
    # By module, not by file: methods that `dataclass` wrote have no file.
    return frame.f_globals.get("__name__", "").partition(".")[0] in PACKAGES


def _name(frame: Any) -> str:
    return f"{frame.f_globals.get('__name__', '').rpartition('.')[2]}: {frame.f_code.co_qualname}"


@contextmanager
def profiled(profile: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Within this context `profile` gets the events of `sys.setprofile`."""
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def main() -> None:
    """Answer requests until there are no more."""
    tree, layers = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    for package in PACKAGES[:2]:
        found = Path(str(sys.modules[package].__file__)).resolve()
        if not found.is_relative_to(tree):
            sys.exit(f"{package} was imported from {found}, not from {tree}; run with PYTHONPATH={tree}")
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    subject = Subject(layers)
    with torch.no_grad():
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(subject, request.pop("do"))(**request)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
