"""The steps of a prompt layer between its products equal torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from hetero_kv.cpu_ops.fused_prefill_layer import gate_rows, norm_rows, rotate_heads
from hetero_kv.cpu_ops.gates import GELU_TANH, SILU

DTYPES = [torch.float32, torch.bfloat16]
ROWS, WIDTHS = st.integers(1, 40), st.integers(1, 150)
# Of numbers whose sum was rounded to the other side: a step of the dtype.
STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def numbers(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor):
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def normed(x, weight, epsilon):
    """As transformers has it, rounding included."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight.to(x.dtype) * scaled.to(x.dtype)


def rotated(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], -1) * sin


def assert_near(mine, expected):
    assert mine.dtype is expected.dtype
    torch.testing.assert_close(mine, expected, rtol=STEP[expected.dtype], atol=STEP[expected.dtype] / 10)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=ROWS, width=WIDTHS, adds=st.booleans(), epsilon=st.sampled_from([0.0, 1e-6, 0.5]), threads=st.integers(1, 3)
)
@settings(max_examples=25, deadline=None)
def test_norms_and_sums(dtype, rows, width, adds, epsilon, threads):
    x, weight = numbers(rows, width, dtype=dtype), numbers(width, dtype=dtype, seed=1).float()
    added = numbers(rows, width, dtype=dtype, seed=2) if adds else None
    total = x + added if adds else x.clone()
    out = torch.full_like(x, 7)
    norm_rows(bits(x), None if added is None else bits(added), weight.numpy(), epsilon, bits(out), min(threads, 2))
    assert torch.equal(x, total)
    assert_near(out, normed(total, weight, epsilon))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@given(positions=st.integers(1, 20), batch=st.integers(1, 3), heads=st.integers(1, 5), half=st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_rotation(dtype, has_norm, positions, batch, heads, half):
    dim = 2 * half
    x, weight = numbers(batch, positions, heads, dim, dtype=dtype), numbers(dim, dtype=dtype, seed=1).float()
    angles = torch.arange(positions)[:, None] * torch.rand(half, generator=torch.Generator().manual_seed(2))
    cos, sin = (
        turned.to(dtype) for turned in (torch.cat([angles, angles], -1).cos(), torch.cat([angles] * 2, -1).sin())
    )
    before = normed(x, weight, 1e-6) if has_norm else x
    expected = rotated(before, cos[:, None], sin[:, None])
    mine = x.reshape(batch * positions, -1).clone()
    rotate_heads(bits(mine), bits(cos), bits(sin), weight.numpy() if has_norm else None, 1e-6)
    # A norm that was rounded to the other side, times a cosine and a sine.
    torch.testing.assert_close(
        mine.view_as(expected), expected, rtol=STEP[dtype], atol=(4 if has_norm else 1) * STEP[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
@given(rows=ROWS, width=WIDTHS, scale=st.sampled_from([0.01, 1.0, 30.0]))
@settings(max_examples=15, deadline=None)
def test_gates(dtype, kind, rows, width, scale):
    gate, up = (numbers(rows, width, dtype=dtype) * scale).to(dtype), numbers(rows, width, dtype=dtype, seed=1)
    activated = functional.silu(gate) if kind == SILU else functional.gelu(gate, approximate="tanh")
    expected, before = activated * up, up.clone()
    gate_rows(bits(gate), bits(up), kind)
    assert torch.equal(up, before)
    torch.testing.assert_close(gate, expected, rtol=STEP[dtype], atol=1e-6 * max(scale, 1))


def test_intermediate_results_are_rounded_to_bfloat16():
    """Else a prompt's numbers would differ from the layer's own in every second place."""
    x, weight = numbers(64, 896, dtype=torch.bfloat16), numbers(896, dtype=torch.bfloat16, seed=1)
    out = torch.empty_like(x)
    norm_rows(bits(x), None, weight.float().numpy(), 1e-6, bits(out))
    assert (out == normed(x, weight, 1e-6)).float().mean() > 0.999
    assert (out == normed(x.float(), weight.float(), 1e-6).bfloat16()).float().mean() < 0.9
    angles = torch.arange(64)[:, None] * torch.logspace(0, -3, 32).repeat(2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    heads, turned = x.unflatten(1, (14, 64)), x.clone()
    rotate_heads(bits(turned), bits(cos), bits(sin))
    assert torch.equal(turned.view_as(heads), rotated(heads, cos[:, None], sin[:, None]))
    exactly = rotated(heads.float(), cos[:, None].float(), sin[:, None].float()).bfloat16()
    assert (turned.view_as(heads) == exactly).float().mean() < 0.9
    gate, up = x.clone(), numbers(64, 896, dtype=torch.bfloat16, seed=3)
    gate_rows(bits(gate), bits(up), SILU)
    assert (gate == functional.silu(x) * up).float().mean() > 0.999
    assert (gate == (functional.silu(x.float()) * up.float()).bfloat16()).float().mean() < 0.9


def test_gates_that_are_as_good_as_shut_or_open():
    gate = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 0.0, float("nan")]])
    up = torch.ones_like(gate)
    for kind in (SILU, GELU_TANH):
        mine = gate.clone()
        gate_rows(mine.numpy(), up.numpy(), kind)
        assert mine[0, :2].abs().max() < 1e-7
        assert mine[0, 2:5].tolist() == [200.0, pytest.approx(1e30), 0.0]
        assert mine[0, 5].isnan()


def test_arrays_that_do_not_fit_are_refused():
    x, weight = np.zeros((4, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(ValueError, match=r"weight \(7,\)"):
        norm_rows(x, None, weight[:7], 1e-6, x.copy())
    with pytest.raises(ValueError, match=r"added \[\(4, 8\), \(3, 8\)\]"):
        norm_rows(x, x[:3], weight, 1e-6, x.copy())
    with pytest.raises(ValueError, match=r"added \[\(4, 8\), \(0, 8\)\]"):
        norm_rows(x, x[:0], weight, 1e-6, x.copy())
    with pytest.raises(ValueError, match=r"added \[\(3, 8\)\]"):
        norm_rows(x, None, weight, 1e-6, x[:3])
    with pytest.raises(ValueError, match=r"cos \(3, 4\)"):
        rotate_heads(x, x[:3, :4].copy(), x[:3, :4].copy())
    with pytest.raises(ValueError, match="do not fit"):
        rotate_heads(x, x[:, :3].copy(), x[:, :3].copy())
    with pytest.raises(ValueError, match="do not fit"):
        rotate_heads(x, x[:, :4].copy(), x[:, :4].copy(), weight)
    with pytest.raises(ValueError, match=r"up \(4, 7\)"):
        gate_rows(x, x[:, :7].copy(), SILU)
    with pytest.raises(TypeError):
        gate_rows(x, x.astype(np.float64), SILU)
