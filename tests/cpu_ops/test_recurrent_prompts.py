"""The kernel of a prompt's gated delta net computes the recurrence, from any state, in any number of blocks."""

import numpy as np
import pytest

from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.recurrent_prompts import convolution_region, delta_prompt, prompt_rule_region

HEADS, KEY_HEADS, K_DIM, V_DIM, TAPS = 4, 2, 8, 16, 4
CHANNELS, INNER = 2 * KEY_HEADS * K_DIM + HEADS * V_DIM, HEADS * V_DIM
EPSILON = 1e-6


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(inputs, history, weight, decay, time_bias, state, norm):
    """The outputs and the state by equation 10 of arXiv:2412.06464, in float64."""
    inputs, history, weight, state = (each.astype(np.float64) for each in (inputs, history[0], weight, state[0].copy()))
    padded = np.concatenate([history.T, inputs[:, :CHANNELS]])
    outputs = []
    for token, numbers in enumerate(inputs):
        convolved = (padded[token + 1 : token + 1 + TAPS] * weight).sum(axis=0)
        convolved *= sigmoid(convolved)
        q, k, v = np.split(convolved, [KEY_HEADS * K_DIM, 2 * KEY_HEADS * K_DIM])
        q, k = (np.repeat(each.reshape(KEY_HEADS, K_DIM), HEADS // KEY_HEADS, axis=0) for each in (q, k))
        q, k = (each / np.sqrt((each**2).sum(axis=1, keepdims=True) + 1e-6) for each in (q, k))
        z, b, a = np.split(numbers[CHANNELS:], [INNER, INNER + HEADS])
        kept = np.exp(decay * np.log1p(np.exp(a + time_bias)))
        state *= kept[:, None, None]
        remembered = np.einsum("hkv,hk->hv", state, k)
        change = (v.reshape(HEADS, V_DIM) - remembered) * sigmoid(b)[:, None]
        state += k[:, :, None] * change[:, None]
        out = np.einsum("hkv,hk->hv", state, q) / np.sqrt(K_DIM)
        out = out / np.sqrt((out**2).mean(axis=1, keepdims=True) + EPSILON) * norm
        outputs.append(out.reshape(-1) * z * sigmoid(z))
    return np.array(outputs), state


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 3, 32, 33, 100])
def test_outputs_and_state_are_those_of_the_recurrence(tokens, threads):
    generator = np.random.default_rng(tokens)
    normal = lambda *shape: generator.standard_normal(shape).astype(np.float32)  # noqa: E731
    inputs, history = normal(tokens, CHANNELS + INNER + 2 * HEADS), normal(1, CHANNELS, TAPS)
    weight, decay, time_bias = normal(TAPS, CHANNELS), -np.exp(normal(HEADS)), normal(HEADS)
    state, norm, mixed = normal(1, HEADS, K_DIM, V_DIM), normal(V_DIM), np.empty((tokens, INNER), np.float32)
    # The time step may be so large that softplus returns it.
    inputs[0, -1] = 30
    expected, final = reference(inputs, history, weight, decay, time_bias, state, norm)
    delta_prompt("float32")(
        all_threads(), convolution_region("float32 float32"), prompt_rule_region("float32"), inputs, history, weight,
        decay, time_bias, state, norm, np.float32(EPSILON), KEY_HEADS, mixed, threads,
    )  # fmt: skip
    np.testing.assert_allclose(mixed, expected, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(state[0], final, rtol=1e-3, atol=1e-5)
