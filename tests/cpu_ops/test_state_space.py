"""Mamba-2's kernels compute the recurrence, from any state, for prompts in any number of blocks and for tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numba import njit

from hetero_kv.cpu_ops.cpu_features import available, isa
from hetero_kv.cpu_ops.gates import softplus
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.recurrent_prompts import convolution_region
from hetero_kv.cpu_ops.state_space_prompts import block_region, gated_norm_region, mamba2_prompt
from hetero_kv.cpu_ops.state_space_steps import mamba2_between, update_region

TAPS, EPSILON = 4, 1e-5


def silu(x):
    return x / (1 + np.exp(-x))


@dataclass
class Mixer:
    """Random numbers of a mixer, and tokens for it."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    tokens: int
    norm_groups: int = 1
    gates_last: int = 0
    has_norm: bool = True
    limits: tuple[float, float] = (0.0, np.inf)

    def __post_init__(self):
        generator = np.random.default_rng(self.tokens)
        normal = lambda *shape: generator.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.inner = self.heads * self.head_dim
        self.channels = self.inner + 2 * self.groups * self.state_dim
        self.inputs = normal(self.tokens, self.inner + self.channels + self.heads)
        self.history, self.weight, self.bias = normal(1, self.channels, TAPS), normal(TAPS, self.channels), normal(1)
        self.bias = np.repeat(self.bias, self.channels) if self.tokens % 2 else np.empty(0, np.float32)
        self.numbers = -np.exp(normal(self.heads)), normal(self.heads) - 1, normal(self.heads)
        self.state = normal(1, self.heads, self.head_dim, self.state_dim)
        self.norm = normal(self.inner if self.has_norm else 0)

    def expected(self, *, limited=True):
        """The outputs and the state by the recurrence of arXiv:2405.21060, in float64."""
        decay, time_bias, skip = self.numbers
        heads, inner, last = self.heads, self.inner, self.inner + self.channels
        padded = np.concatenate([self.history[0].T, self.inputs[:, inner:last]]).astype(np.float64)
        state, outputs = self.state[0].astype(np.float64), []
        for token, numbers in enumerate(self.inputs.astype(np.float64)):
            convolved = (padded[token + 1 : token + 1 + TAPS] * self.weight).sum(axis=0)
            convolved = silu(convolved + (self.bias if self.bias.size else 0))
            x, b, c = np.split(convolved, [inner, inner + self.groups * self.state_dim])
            x = x.reshape(heads, -1)
            b, c = (np.repeat(each.reshape(self.groups, -1), heads // self.groups, axis=0) for each in (b, c))
            time = np.log1p(np.exp(numbers[last:] + time_bias))
            time = np.clip(time, *self.limits) if limited else time
            state = state * np.exp(time * decay)[:, None, None] + np.einsum("h,hp,hn->hpn", time, x, b)
            y = (np.einsum("hpn,hn->hp", state, c) + skip[:, None] * x).reshape(-1)
            outputs.append(self._normed(y, silu(numbers[:inner])))
        return np.array(outputs), state

    def _normed(self, y, gates):
        if not self.has_norm:
            return y * gates
        y = y if self.gates_last else y * gates
        grouped = y.reshape(self.norm_groups, -1)
        y = (grouped / np.sqrt((grouped**2).mean(axis=1, keepdims=True) + EPSILON)).reshape(-1) * self.norm
        return y * gates if self.gates_last else y

    @property
    def norm_arguments(self):
        return self.norm, np.float32(EPSILON), self.norm_groups, self.gates_last

    def passed(self, first, end, history, state, threads=2, instructions=None):
        """The outputs of these tokens as a prompt behind `history` and `state`, which is updated."""
        instructions = instructions or isa()
        mixed = np.empty((end - first, self.inner), np.float32)
        mamba2_prompt("float32", instructions)(
            all_threads(), convolution_region("float32 float32"), block_region("float32", instructions),
            gated_norm_region("float32"), self.inputs[first:end].copy(), history, self.weight, self.bias,
            *self.numbers, *map(np.float32, self.limits), state, self.groups, *self.norm_arguments, mixed, threads,
        )  # fmt: skip
        return mixed

    def stepped(self, token, history, state, threads=2):
        """The output of a decoded token behind `history` and `state`, which are updated."""
        mixed = np.empty((1, self.inner), np.float32)
        mamba2_between("float32")(
            all_threads(), update_region(), self.inputs[token : token + 1].copy(), history,
            np.ascontiguousarray(self.weight.T), self.bias, *self.numbers, state, self.groups, *self.norm_arguments,
            mixed, threads,
        )  # fmt: skip
        return mixed

    def history_behind(self, tokens):
        """The convolution's state behind so many tokens."""
        inputs = self.inputs[:tokens, self.inner : self.inner + self.channels]
        return np.concatenate([self.history[0].T, inputs])[None, -TAPS:].transpose(0, 2, 1).copy()


def close(mine, expected):
    np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 200])
def test_outputs_and_state_of_a_prompt_are_those_of_the_recurrence(tokens, threads):
    mixer = Mixer(6, 16, 8, 2, tokens)
    # The time step may be so large that softplus returns it.
    mixer.inputs[0, -1] = 30
    expected, final = mixer.expected()
    state = mixer.state.copy()
    close(mixer.passed(0, tokens, mixer.history, state, threads), expected)
    close(state[0], final)


@pytest.mark.parametrize("instructions", available())
def test_every_instruction_set_takes_heads_of_any_size(instructions):
    for heads, head_dim, state_dim, groups in [(2, 80, 24, 1), (3, 5, 3, 3), (2, 64, 128, 2)]:
        mixer = Mixer(heads, head_dim, state_dim, groups, 130)
        expected, final = mixer.expected()
        state = mixer.state.copy()
        close(mixer.passed(0, 130, mixer.history, state, instructions=instructions), expected)
        close(state[0], final)


@pytest.mark.parametrize(
    "kind",
    [
        {"norm_groups": 2},
        {"norm_groups": 2, "gates_last": 1},
        {"has_norm": False},
        {"limits": (0.2, 0.6)},
    ],
)
def test_norms_and_limits_are_those_of_every_model(kind):
    mixer = Mixer(4, 16, 8, 2, 71, **kind)
    expected, final = mixer.expected()
    state = mixer.state.copy()
    close(mixer.passed(0, 71, mixer.history, state), expected)
    close(state[0], final)
    if "limits" in kind:
        assert np.abs(mixer.expected(limited=False)[1] - final).max() > 0.1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_state_passes_from_part_to_part_and_to_decoded_tokens(threads):
    mixer = Mixer(4, 16, 8, 2, 90, norm_groups=2)
    expected, final = mixer.expected()
    state, outputs = mixer.state.copy(), []
    for first, end in ((0, 5), (5, 70), (70, 71), (71, 87)):
        outputs.append(mixer.passed(first, end, mixer.history_behind(first), state, threads))
    history = mixer.history_behind(87)
    outputs += [mixer.stepped(token, history, state, threads) for token in range(87, 90)]
    close(np.concatenate(outputs), expected)
    close(state[0], final)
    np.testing.assert_array_equal(history, mixer.history_behind(90))


def test_rows_of_a_step_do_not_depend_on_each_other():
    mixer = Mixer(4, 16, 8, 2, 2)
    state, history = np.repeat(mixer.state, 2, axis=0), np.repeat(mixer.history, 2, axis=0)
    mixed = np.empty((2, mixer.inner), np.float32)
    mamba2_between("float32")(
        all_threads(), update_region(), mixer.inputs, history, np.ascontiguousarray(mixer.weight.T), mixer.bias,
        *mixer.numbers, state, mixer.groups, *mixer.norm_arguments, mixed, 2,
    )  # fmt: skip
    for row in range(2):
        own, before = mixer.state.copy(), mixer.history.copy()
        np.testing.assert_array_equal(mixer.stepped(row, before, own)[0], mixed[row])
        np.testing.assert_array_equal(own[0], state[row])


def test_softplus_keeps_the_last_digits_of_small_numbers():
    @njit
    def of(numbers, out):
        for i in range(numbers.size):
            out[i] = softplus(numbers[i])

    numbers = np.linspace(-80, 40, 100_001).astype(np.float32)
    out = np.empty_like(numbers)
    of(numbers, out)
    np.testing.assert_allclose(out, np.log1p(np.exp(numbers.astype(np.float64))), rtol=1e-5)
