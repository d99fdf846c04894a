"""A recurrent mixer's forward for a prompt: the module's own projections, and one kernel between them.

transformers computes a gated delta net's rule by products of chunks, in some forty calls of torch whose results pass
through DRAM. The kernel (`cpu_ops.recurrent_prompts`) computes it token by token, in cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionLayer

from hetero_kv.adapter.foreign import mark_own
from hetero_kv.adapter.llama_layer import largest_difference
from hetero_kv.adapter.recurrent import forward_replaced, mixer_output, one_by_one
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.recurrent_prompts import convolution_region, delta_prompt, prompt_rule_region
from hetero_kv.cpu_ops.threads import at_most, one_kernel_at_a_time
from hetero_kv.engine.recurrent_state import is_state, named_states, state_layer
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, NAMES, bits

#: Tokens whose projections are joined at a time: they stay in the CPU's caches.
_TOKENS_AT_ONCE = 512


class MixerForward(ABC):
    """A recurrent mixer's forward: the module's own projections, and kernels between them.

    Attributes:
        takes_tokens: whether it computes decoded tokens too.
    """

    takes_tokens = False

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer

    @abstractmethod
    def __call__(self, hidden_states: torch.Tensor, layer: Any, is_prompt: bool) -> torch.Tensor:
        """The module's output for [batch, tokens, width]; updates the state of the cache's layer.

        Args:
            is_prompt: whether these are a part of a prompt, and no decoded token.
        """

    @staticmethod
    def fits(hidden_states: torch.Tensor, layer: Any) -> bool:
        """Whether kernels can read hidden states [batch, tokens, width], and the state before them."""
        if hidden_states.dtype not in ARRAY_DTYPES or hidden_states.device.type != "cpu":
            return False
        # Projections would give another dtype.
        if torch.is_autocast_enabled("cpu"):
            return False
        if not is_state(layer) or layer.record_past:
            return False
        if not layer.has_previous_state.get(0):
            return True
        history, state = layer.conv_states.get(0), layer.recurrent_states.get(0)
        return (
            history is not None
            and state is not None
            and history.dtype is hidden_states.dtype
            and state.dtype is torch.float32
            and history.is_contiguous()
            and state.is_contiguous()
        )

    def in_place(self, is_prompt: bool = True) -> AbstractContextManager[None]:
        """Within this context it is the module's forward, for calls that it can take."""
        mixer, forward = self._mixer, self._mixer.forward

        def passed(
            hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:  # fmt: skip
            layer: Any = None if cache_params is None else state_layer(cache_params, mixer.layer_idx)
            if attention_mask is None and self.fits(hidden_states, layer):
                return self(hidden_states, layer, is_prompt)
            # Some modules ignore their state in a call of several tokens.
            continues = is_state(layer) and layer.has_previous_state.get(0) and hidden_states.shape[1] > 1
            theirs = one_by_one(forward) if continues else forward
            output: torch.Tensor = theirs(
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            return output

        return forward_replaced(mixer, mark_own(passed))

    @torch.no_grad()
    def difference_from_module(self, hidden: torch.Tensor, first_part: int) -> float:
        """The largest difference of outputs and states from the module's, for random tokens [rows, tokens, width].

        They pass as a prompt in two parts, the first of `first_part` tokens. If it takes decoded tokens, the last one
        passes behind the others too.
        """
        prompts = [(hidden[:, :first_part], True), (hidden[:, first_part:], True)]
        difference = self._difference(prompts, [hidden])
        if self.takes_tokens:
            parts = [hidden[:, :-1], hidden[:, -1:]]
            difference = max(difference, self._difference([(parts[0], True), (parts[1], False)], parts))
        return difference

    def _difference(self, mine: Sequence[tuple[torch.Tensor, bool]], theirs: Sequence[torch.Tensor]) -> float:
        state, their_state = LinearAttentionLayer(1), LinearAttentionLayer(1)
        expected = torch.cat([mixer_output(self._mixer, part, their_state) for part in theirs], dim=1)
        outputs = []
        for part, is_prompt in mine:
            with self.in_place(is_prompt):
                outputs.append(mixer_output(self._mixer, part, state))
        return max(largest_difference([torch.cat(outputs, dim=1)], [expected]), states_difference(state, their_state))


def states_difference(mine: LinearAttentionLayer, theirs: LinearAttentionLayer) -> float:
    """The largest relative difference, of norms, of two states."""
    return largest_difference(list(named_states(mine).values()), list(named_states(theirs).values()))


class DeltaNetPrompt(MixerForward):
    """A delta net's forward for the tokens of a prompt.

    Args:
        mixer: the module.
        projections: those of its input.
        columns: where queries, keys, values, z, beta and the time step of all heads are in their joined outputs; None:
            in this order.
        numbers: the convolution's weight [channels, taps], -exp(A_log) and the time step's bias [heads], float32.
        norm: of each head: factors, float32, and epsilon.
    """

    def __init__(
        self, mixer: Any, projections: Sequence[Any], columns: np.ndarray | None,
        numbers: tuple[np.ndarray, np.ndarray, np.ndarray], norm: tuple[np.ndarray, np.float32],
    ) -> None:  # fmt: skip
        super().__init__(mixer)
        self._projections = projections
        self._columns = None if columns is None else torch.from_numpy(columns)
        # The weight may be the memory of the module's, which others may change: it is transposed for each prompt.
        self._weight, self._decay, self._time_bias = numbers
        self._norm = norm

    def __call__(self, hidden_states: torch.Tensor, layer: Any, is_prompt: bool) -> torch.Tensor:
        """See `MixerForward`."""
        parts = -(-hidden_states.shape[1] // _TOKENS_AT_ONCE)
        if parts > 1:
            outputs = [self(part, layer, is_prompt) for part in hidden_states.tensor_split(parts, dim=1)]
            return torch.cat(outputs, dim=1)
        inputs = torch.cat([projection(hidden_states) for projection in self._projections], dim=-1)
        inputs = (inputs if self._columns is None else inputs[..., self._columns]).detach().contiguous()
        mixer, batch, dtype = self._mixer, len(inputs), inputs.dtype
        weight = np.ascontiguousarray(self._weight.T)
        taps, channels = weight.shape
        shape = batch, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
        history, state = past_states(layer, (batch, channels, taps), shape, dtype)
        mixed = torch.empty(batch, inputs.shape[1], mixer.value_dim, dtype=dtype)
        name = NAMES[bits(mixed).dtype]
        for row in range(batch):
            own, before = inputs[row], history[row : row + 1]
            with one_kernel_at_a_time:
                delta_prompt(name)(
                    all_threads(), convolution_region(f"{name} float32"), prompt_rule_region(name), bits(own),
                    bits(before), weight, self._decay, self._time_bias, bits(state[row : row + 1]), *self._norm,
                    mixer.num_k_heads, bits(mixed[row]), at_most(torch.get_num_threads()),
                )  # fmt: skip
        layer.update_conv_state(inputs[:, -taps:, :channels].transpose(1, 2), conv_kernel_size=taps)
        layer.update_recurrent_state(state)
        output: torch.Tensor = mixer.out_proj(mixed)
        return output


def past_states(
    layer: Any, history: tuple[int, ...], state: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of a cache layer, of the convolution and the recurrence, or zeros of these shapes at the beginning.

    dtype: of the convolution's; the recurrence's is float32, whatever torch's default.
    """
    if layer.has_previous_state.get(0):
        return layer.conv_states[0], layer.recurrent_states[0]
    return torch.zeros(history, dtype=dtype), torch.zeros(state, dtype=torch.float32)
