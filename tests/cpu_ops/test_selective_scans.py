"""Mamba's selective scan in a kernel is the recurrence, from any state, for prompts and tokens of several rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_kv.cpu_ops.cpu_features import available, isa
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.recurrent_prompts import convolution_region
from hetero_kv.cpu_ops.selective_scans import scan_region, selective_scan, short_prompt_convolution
from hetero_kv.weights.kernel_arrays import bits

TAPS = 4


def silu(x):
    return x / (1 + np.exp(-x))


def normal(seed, *shapes):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(np.float32) for shape in shapes]


def numbers_of(rows, tokens, channels, state_dim):
    """x, times, b, c, gates behind some columns; decay, time_bias, skip; states."""
    shape = rows, tokens, channels
    x, times, b, c, gates, decay, time_bias, skip, states = normal(
        tokens, shape, shape, (rows, tokens, state_dim), (rows, tokens, state_dim), (rows, tokens, channels + 3),
        (state_dim, channels), channels, channels, (rows, channels, state_dim),
    )  # fmt: skip
    # The time step may be so large that softplus returns it.
    times[0, 0, 0] = 30
    return (x, times, b, c, gates), (-np.exp(decay), time_bias - 1, skip), states


def expected(tokens_of, numbers, states):
    """The outputs and the states by the recurrence of arXiv:2312.00752 (equations 2a and 2b), in float64."""
    x, times, b, c, gates = (each.astype(np.float64) for each in tokens_of)
    decay, time_bias, skip = (each.astype(np.float64) for each in numbers)
    states, outputs = states.astype(np.float64), np.empty(x.shape)
    for token in range(x.shape[1]):
        time = np.log1p(np.exp(times[:, token] + time_bias))
        states = states * np.exp(time[..., None] * decay.T)
        states = states + (time * x[:, token])[..., None] * b[:, token, None]
        y = np.einsum("rcs,rs->rc", states, c[:, token]) + skip * x[:, token]
        outputs[:, token] = y * silu(gates[:, token, 3:])
    return outputs, states


def scanned(tokens_of, numbers, states, threads, instructions=None):
    """The outputs; `states` are updated."""
    mixed = np.empty(tokens_of[0].shape, np.float32)
    variant = "float32 float32"
    selective_scan(variant)(
        all_threads(), scan_region(variant, instructions or isa()), *map(np.ascontiguousarray, tokens_of), 3, *numbers,
        states, mixed, threads,
    )  # fmt: skip
    return mixed


def close(mine, reference):
    np.testing.assert_allclose(mine, reference, rtol=1e-3, atol=1e-5 * np.abs(reference).max())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("rows", "tokens", "channels", "state_dim"), [(1, 1, 64, 16), (2, 70, 128, 16), (3, 33, 100, 5), (1, 9, 7, 1)]
)
def test_outputs_and_states_are_those_of_the_recurrence(rows, tokens, channels, state_dim, threads):
    tokens_of, numbers, states = numbers_of(rows, tokens, channels, state_dim)
    outputs, final = expected(tokens_of, numbers, states)
    close(scanned(tokens_of, numbers, states, threads), outputs)
    close(states, final)


@pytest.mark.parametrize("instructions", available())
def test_every_instruction_set_computes_the_recurrence(instructions):
    tokens_of, numbers, states = numbers_of(1, 50, 70, 16)
    outputs, final = expected(tokens_of, numbers, states)
    close(scanned(tokens_of, numbers, states, 2, instructions), outputs)
    close(states, final)


@pytest.mark.parametrize("instructions", available())
def test_bfloat16_is_rounded_once(instructions):
    tokens_of, numbers, states = numbers_of(2, 50, 70, 16)
    x, times, b, c, gates = tokens_of
    rounded = [torch.from_numpy(each).bfloat16() for each in (x, times, gates)]
    x, times, gates = (each.float().numpy() for each in rounded)
    outputs, final = expected((x, times, b, c, gates), numbers, states)
    mixed, variant = torch.empty(x.shape, dtype=torch.bfloat16), "uint16 uint16"
    selective_scan(variant)(
        all_threads(), scan_region(variant, instructions), bits(rounded[0]), bits(rounded[1]), b, c, bits(rounded[2]),
        3, *numbers, states, bits(mixed), 2,
    )  # fmt: skip
    close(states, final)
    np.testing.assert_allclose(mixed.float().numpy(), outputs, rtol=2**-8, atol=1e-4 * np.abs(outputs).max())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_state_passes_from_part_to_part_and_to_tokens(threads):
    tokens_of, numbers, states = numbers_of(2, 40, 96, 16)
    outputs, final = expected(tokens_of, numbers, states)
    parts = [
        scanned([each[:, first:end] for each in tokens_of], numbers, states, threads)
        for first, end in ((0, 30), (30, 37), (37, 38), (38, 39), (39, 40))
    ]
    close(np.concatenate(parts, axis=1), outputs)
    close(states, final)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_continues_from_its_history(has_bias):
    inputs, history, weight, bias = normal(0, (2, 20, 70), (2, 50, TAPS), (TAPS, 50), 50)
    bias = bias if has_bias else bias[:0]
    out = np.empty((2, 20, 50), np.float32)
    short_prompt_convolution("float32")(
        all_threads(), convolution_region("float32 float32"), inputs, history, weight, bias, out, 2
    )
    padded = np.concatenate([history.transpose(0, 2, 1), inputs[..., :50]], axis=1).astype(np.float64)
    sums = sum(padded[:, 1 + tap : 21 + tap] * weight[tap] for tap in range(TAPS))
    close(out, silu(sums + (bias if has_bias else 0)))
