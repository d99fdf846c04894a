"""Recurrent modules, whose cache is a state and no KV: gated delta nets, Mamba, short convolutions.

A prompt reaches them in chunks, each after the state of the previous one. Whether a module continues from its state is
tested: some of transformers' modules ignore it in calls of more than one token (the scan of Mamba, as in Jamba, takes
no state). These get the tokens after a state one by one, as in decoding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.engine.recurrent_state import StateShape, is_state, named_states, parted
from hetero_kv.errors import UnsupportedModelError

# The cache methods that recurrent modules call. An attention module calls `update`.
_CALLS = frozenset({"update_conv_state", "update_recurrent_state"})
# The trial: tokens before and after the boundary, and the factor that scales the state there, which reveals a module
# that ignores it.
_BEFORE, _BEHIND, _LARGER = 5, 3, 16.0
# Relative differences of norms that rounding explains.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}

#: (class, device's type, dtype of its products) -> whether modules of this class continue in chunks.
_known: dict[tuple[type, str, torch.dtype], bool] = {}


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module keeps a recurrent state in the cache, and no keys and values."""
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not _CALLS.isdisjoint(code.co_names)


def continues_in_chunks(path: str, mixer: nn.Module, hidden_states: torch.Tensor, number_of_states: int) -> bool:
    """Whether the module continues from its state in a call of several tokens; tested once per class.

    Args:
        hidden_states: [batch, tokens, width], for the trial's width, dtype and device.

    Raises UnsupportedModelError when even a whole prompt in one call differs from its tokens one by one.
    """
    key = type(mixer), hidden_states.device.type, _dtype_of_products(hidden_states)
    if key not in _known:
        _known[key] = _try(path, mixer, hidden_states, number_of_states)
    return _known[key]


@torch.no_grad()
def _try(path: str, mixer: nn.Module, like: torch.Tensor, number_of_states: int) -> bool:
    count = _BEFORE + _BEHIND
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, count, like.shape[2], generator=generator).to(like.device, like.dtype)
    tolerance = _TOLERANCE[_dtype_of_products(like)]

    def passed(sizes: list[int], larger: float) -> list[torch.Tensor]:
        """The output of the tokens in parts of these sizes, and the final state."""
        layer = LinearAttentionLayer(number_of_states)
        outputs, start = [], 0
        for size in sizes:
            if start == _BEFORE:
                for state in named_states(layer).values():
                    state.mul_(larger)
            outputs.append(mixer_output(mixer, hidden[:, start : start + size], layer))
            start += size
        return [torch.cat(outputs, dim=1), *named_states(layer).values()]

    one_by_one = passed([1] * count, 1.0)
    difference = _difference(passed([count], 1.0), one_by_one)
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{path} ({type(mixer).__name__}) computes a prompt differently from its tokens one by one (relative "
            f"difference {difference:.2g}), so that a prompt cannot be cut into chunks; run the model without rules"
        )
    return _difference(passed([_BEFORE, _BEHIND], _LARGER), passed([1] * count, _LARGER)) <= tolerance


def _dtype_of_products(hidden_states: torch.Tensor) -> torch.dtype:
    """The dtype that products with these hidden states have: autocast's, or their own."""
    device = hidden_states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype


def mixer_output(mixer: Any, hidden_states: torch.Tensor, layer: LinearAttentionLayer) -> torch.Tensor:
    """The module's output after the state of `layer`, which the call updates."""
    layers: Any = [layer] * (mixer.layer_idx + 1)
    cache_argument = as_cache(type(mixer).forward, Cache(layers=layers))
    output = mixer(hidden_states=hidden_states, attention_mask=None, **cache_argument)
    return output[0] if isinstance(output, tuple) else output


def _difference(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest relative difference of norms; infinity where a number is NaN."""
    differences = [
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
        for a, b in zip(mine, theirs, strict=True)
    ]
    return max(differences) if all(difference == difference for difference in differences) else float("inf")


@contextmanager
def forward_replaced(module: Any, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Within this context the module has another forward; None for its class's."""
    own = module.__dict__.get("forward")
    _set_forward(module, forward)
    try:
        yield
    finally:
        _set_forward(module, own)


def _set_forward(module: Any, forward: Callable[..., Any] | None) -> None:
    if forward is not None:
        module.forward = forward
    elif "forward" in module.__dict__:
        del module.forward


def token_by_token(mixer: nn.Module) -> AbstractContextManager[None]:
    """Within this context the module gets its tokens one by one, regardless of the input of the layer around it."""
    return forward_replaced(mixer, one_by_one(mixer.forward))


def one_by_one(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, which gets its tokens one by one."""

    def passed(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = hidden_states.split(1, dim=1)
        return torch.cat([forward(token, *args, **kwargs) for token in tokens], dim=1)

    return passed


def state_shapes(model: nn.Module, config: Any) -> dict[int, StateShape]:
    """Layer -> the shape of its module's state, for a loaded model or one on the meta device.

    Determined by passing one token through an empty module of the same class and config on the meta device.

    Raises UnsupportedModelError for a module whose state cannot be determined.
    """
    shapes = {}
    layers = DynamicCache(config=config).layers
    for path, module in model.named_modules():
        if is_recurrent(module):
            layer, state = parted(layers[module.layer_idx], module.layer_idx)
            shapes[module.layer_idx] = _state_shape(path, module, config, state or layer, model.dtype)
    return shapes


def _state_shape(path: str, module: nn.Module, config: Any, layer: Any, dtype: Any) -> StateShape:
    if not is_state(layer):
        raise UnsupportedModelError(
            f"{path} ({type(module).__name__}) keeps a state in layer {module.layer_idx} of the cache, a "
            f"{type(layer).__name__}, which hetero_kv does not support"
        )
    try:
        with torch.device("meta"), torch.no_grad():
            empty = type(module)(config, module.layer_idx).to(dtype).eval()
            for name, buffer in module.named_buffers(recurse=False):
                # The model around it may have given it some.
                empty.register_buffer(name, buffer.to("meta"))
            mixer_output(empty, torch.zeros(1, 1, config.hidden_size, dtype=dtype), layer)
    except (TypeError, NotImplementedError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{path} ({type(module).__name__}): the size of its state cannot be determined ({error})"
        ) from error
    return StateShape(named_states(layer))
