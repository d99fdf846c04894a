"""Which kernel computes attention on a GPU, and that flash-attn is called as documented."""

from __future__ import annotations

import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.gpu_ops import attention_backend
from hetero_kv.gpu_ops.attention import chunk_attention, sliding_window_attention
from hetero_kv.gpu_ops.attention_backend import BACKENDS, AttentionBackend, AttentionKernel, attending_by
from hetero_kv.gpu_ops.flash import flash_attention_in_torch
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import SettingError
from tests.support.devices import model_on, simulated_cuda
from tests.support.simulated_cuda.tensor import SimulatedTensor
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda

ATEN, FLASH_ATTN, TRITON, TILES = AttentionKernel
HALF, SINGLE = torch.float16, torch.float32
PAST, NEW, SCALE = 37, 20, 0.3


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """As flash-attn 2.6 documents it: [batch, tokens, heads, dim], masks that end at the last query and key."""
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type, and one head dim up to 256")
    index, simulation = q.place.index, SimulatedTensor.simulation
    simulation.launch("flash_attn", index, [q, k, v], [])
    q, k, v = (t.data_on_cpu.transpose(1, 2) for t in (q, k, v))
    past, window = k.shape[2] - q.shape[2], None
    parts = k, v, k[:, :, :0], v[:, :, :0]
    if causal:
        window = window_size[0] + 1 if window_size[0] >= 0 else None
        parts = k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:]
    elif window_size != (-1, -1):
        raise NotImplementedError("a window without a causal mask is nothing that the project asks for")
    out, lse = flash_attention_in_torch(q, *parts, softmax_scale, softcap, window)
    out, lse = SimulatedTensor(out.transpose(1, 2).contiguous(), index), SimulatedTensor(lse, index)
    return (out, lse, None) if return_attn_probs else out


@pytest.fixture(params=[True, False], ids=["flash-attn", "no flash-attn"])
def has_flash_attn(request, monkeypatch):
    """The package, or none, whatever is installed."""
    package = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None) if request.param else None
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package if request.param else None)
    attention_backend.has_flash_attn.cache_clear()
    yield request.param
    attention_backend.has_flash_attn.cache_clear()


def attended(device, dtype, addition):
    """Attention of a chunk, or of a model's own window, with a sink, and what torch says of it."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, NEW, 24, generator=generator).to(dtype)
    keys, values = (torch.randn(1, 2, PAST + NEW, dim, generator=generator).to(dtype) for dim in (24, 16))
    softcap, window = 3.0 if addition == "softcap" else None, 11 if addition == "window" else None
    sink = torch.tensor([-1.0, 0.0, 1.0, 3.0]).to(dtype)
    parts = keys[:, :, :PAST], values[:, :, :PAST], keys[:, :, PAST:], values[:, :, PAST:]
    expected = flash_attention_in_torch(q, *parts, SCALE, softcap, window, sink)
    q, keys, values, sink, *parts = (t.to(device) for t in (q, keys, values, sink, *parts))
    if window:
        return sliding_window_attention(q, keys, values, window, SCALE, softcap, sink), expected
    return chunk_attention(q, *parts, SCALE, softcap, sink), expected


@pytest.mark.parametrize(
    ("choice", "dtype", "capability", "addition", "kernels"),
    # The last: with flash-attn, and without.
    [
        ("auto", HALF, (8, 0), None, (ATEN, ATEN)),
        ("auto", HALF, (8, 0), "softcap", (FLASH_ATTN, TRITON)),
        ("auto", HALF, (8, 0), "window", (FLASH_ATTN, TRITON)),
        ("auto", SINGLE, (8, 0), None, (TRITON, TRITON)),
        ("auto", HALF, (7, 5), "window", (TRITON, TRITON)),
        ("flash_attn", HALF, (8, 0), None, (FLASH_ATTN, ATEN)),
        ("flash_attn", SINGLE, (8, 0), "softcap", (TRITON, TRITON)),
        ("triton", HALF, (8, 0), None, (TRITON, TRITON)),
        ("torch", HALF, (8, 0), "window", (TILES, TILES)),
        ("torch", HALF, (7, 5), None, (TILES, TILES)),
    ],
)
def test_the_chosen_backend_computes_what_it_can(has_flash_attn, choice, dtype, capability, addition, kernels):
    pytest.importorskip("triton")
    backend = AttentionBackend(choice)
    with simulated_cuda(capability=capability) as gpu, attending_by(backend):
        (out, lse), expected = attended("cuda", dtype, addition)
        launched = {launch.name for launch in gpu.record.launches}
        used = kernels[0 if has_flash_attn else 1]
        assert backend.used == {used}
        names = {ATEN: "_scaled_dot_product_flash_attention", FLASH_ATTN: "flash_attn", TRITON: "_flash"}
        assert {kernel for kernel, name in names.items() if name in launched} == {used} - {TILES}
        if used is TRITON:
            # One pass that includes the sink, after the trial of whether Triton runs here.
            assert [launch.name for launch in gpu.record.own_launches if launch.name != "zeros"].count("_flash") == 1
        tolerance = 2e-3 if dtype is HALF else 1e-5
        torch.testing.assert_close(out.cpu(), expected[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.cpu(), expected[1], rtol=tolerance, atol=tolerance)


def test_without_triton_torch_computes_the_same(monkeypatch):
    monkeypatch.setattr(attention_backend, "runs_triton", lambda tensor: False)
    monkeypatch.setattr(attention_backend, "has_flash_attn", lambda: False)
    backend = AttentionBackend()
    with simulated_cuda(), attending_by(backend):
        for addition in ("softcap", "window"):
            (out, _), expected = attended("cuda", HALF, addition)
            torch.testing.assert_close(out.cpu(), expected[0], rtol=2e-3, atol=2e-3)
    assert backend.used == {TILES}


def test_every_available_backend_can_be_set():
    for name in BACKENDS:
        assert EngineSettings(attention_backend=name).attention_backend == name
    with pytest.raises(SettingError, match="attention_backend is 'flash'"):
        EngineSettings(attention_backend="flash")


def test_a_backend_that_is_not_installed_is_refused_with_what_would_install_it(monkeypatch):
    monkeypatch.setattr(attention_backend, "has_flash_attn", lambda: False)
    model = tiny_model("llama")
    with pytest.raises(SettingError, match=r"attention_backend is 'flash_attn'; .* --no-build-isolation"):
        inject(model, small_recipe("dense"), command_line={"attention_backend": "flash_attn"})
    assert not hasattr(model, "hetero_kv_injection")


@torch.no_grad()
def test_a_models_backend_follows_its_settings():
    pytest.importorskip("triton")
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda", 0), tiny_model("llama").to(HALF))
        injection = inject(model, small_recipe("dense"), command_line={"attention_backend": "triton"})
        gpu.record.clear()
        model(torch.arange(2, 42, device="cuda")[None], past_key_values=HeteroCache(model, max_seq_len=64))
        assert injection.attention.used == {TRITON}
        assert "_scaled_dot_product_flash_attention" not in {launch.name for launch in gpu.record.launches}
        del model, injection


def test_the_extra_for_gpus_needs_nothing_that_is_built_against_torch():
    """flash-attn needs torch at build time, which pip's isolated builds lack; so it is a separate extra."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["gpu"] == ["triton"]
    assert extras["flash-attn"] == ["flash-attn"]
