"""Devices and number types."""

from __future__ import annotations

import warnings

import pytest
import torch

from hetero_kv.models import ModelError, precision
from hetero_kv.models.precision import cpu_multiplies_bfloat16, resolve_device, resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("BF16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("fp16", torch.float16),
        (torch.float16, torch.float16),
    ],
)
def test_a_dtype_goes_by_its_names(name, dtype):
    assert resolve_dtype(name, CPU) == dtype


@pytest.mark.parametrize(("flags", "dtype"), [("fma avx2 avx512f", "float32"), ("fma avx512_bf16", "bfloat16")])
def test_auto_on_a_cpu_is_bfloat16_only_with_its_instructions(tmp_path, monkeypatch, flags, dtype):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda: cpu_multiplies_bfloat16(cpuinfo))
    assert resolve_dtype("auto", CPU) == resolve_dtype(dtype, CPU)


def test_a_system_that_does_not_describe_its_cpu_counts_as_without_bfloat16(tmp_path):
    assert not cpu_multiplies_bfloat16(tmp_path / "absent")


def test_an_unknown_dtype_is_answered_with_the_nearest():
    with pytest.raises(ModelError, match=r"dtype is 'bfloat61'; did you mean bfloat16\? Give auto, float32"):
        resolve_dtype("bfloat61", CPU)


@pytest.mark.parametrize("device", ["gpu", "", "cpu:x", "meta"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ModelError, match=f"device is '{device}'; give auto, cpu, cuda or cuda:N"):
        resolve_device(device)


def test_a_gpu_that_is_not_there_is_refused():
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(
        ModelError, match=f"device is '{absent}', and this machine has {torch.cuda.device_count()} CUDA"
    ):
        resolve_device(absent)


@pytest.mark.parametrize(
    ("cuda", "told"),
    [("12.8", r"needs a driver for CUDA 12\.8; update the driver"), (None, "lacks CUDA; install a build with CUDA")],
)
def test_a_gpu_that_torch_cannot_use_is_told_with_the_remedy(cuda, told, monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82\nGCC version: 11\n")
    monkeypatch.setattr(precision, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.warns(RuntimeWarning, match=rf"a GPU \(NVIDIA .*470\.82\), .*{told}.*computes on the CPU"):
        assert resolve_device("auto") == CPU
    with pytest.raises(ModelError, match=rf"470\.82\), .*{told}.*give auto or cpu"):
        resolve_device("cuda")
    # One that the user has hidden is not to be used.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_device("auto") == CPU


def test_auto_is_a_device_of_this_machine():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
