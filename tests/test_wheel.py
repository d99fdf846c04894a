"""A wheel holds `hetero_kv` alone, and works where the user has files of our folders' names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What a wheel is built from.
SOURCE = ("configs", "cpu_ops", "gpu_ops", "hetero_kv", "injection_rules", "LICENSE", "README.md", "pyproject.toml")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
#: A user's own modules beside the program, named as folders of the repository are.
OWN = {
    "configs.py": "MINE = True\n",
    "injection_rules/__init__.py": "MINE = True\n",
    "injection_rules/mine.yaml": "this: is no rules file\n",
    "cpu_ops/__init__.py": "MINE = True\n",
    "gpu_ops.py": "MINE = True\n",
}
INSTALLED = """
import sys
import configs, cpu_ops, gpu_ops, injection_rules
import hetero_kv
from hetero_kv import load_rules
from hetero_kv.cli import main
from hetero_kv.rules import recipes

assert configs.MINE and cpu_ops.MINE and gpu_ops.MINE and injection_rules.MINE
assert hetero_kv.__file__.startswith(sys.argv[1]), hetero_kv.__file__
assert "mine" not in recipes.names() and {"adaptive", "gpu-24gb"} <= {*recipes.names()}
assert load_rules("adaptive").rules and load_rules("configs/gpu-24gb.yaml").rules
assert main(["methods"]) == main(["rules", "adaptive"]) == 0
"""
GENERATED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from hetero_kv import HeteroCache, inject

shape = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, hidden_size=32, intermediate_size=32)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).eval()
ids = torch.arange(40)[None]
own = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
untouched = model.generate(ids, **own)
inject(model, "adaptive")
assert model.generate(ids, past_key_values=HeteroCache(model), **own).equal(untouched)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built from a copy of the sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, copy / name)
    built = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def run_installed(wheel, tmp_path_factory):
    """Run a program beside a user's own files, with the wheel installed; returns what it printed."""
    target, folder = tmp_path_factory.mktemp("site-packages"), tmp_path_factory.mktemp("users")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True)
    for name, text in OWN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    def run(program: str) -> str:
        (folder / "program.py").write_text(program)
        environment = os.environ | {"PYTHONPATH": str(target), "HETERO_KV_CONFIG": str(folder / "settings.yaml")}
        command = [sys.executable, "program.py", str(target)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_wheel_holds_one_package_and_all_of_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hetero_kv"}
    folders = {"hetero_kv": "hetero_kv"} | {name: f"hetero_kv/{name}" for name in SOURCE[:5] if name != "hetero_kv"}
    expected = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    assert {name for name in names if name.endswith((".py", ".yaml"))} == expected


def test_an_installed_wheel_reads_its_own_files_beside_a_users(run_installed):
    printed = run_installed(INSTALLED)
    assert "RetrievalAttention" in printed


@pytest.mark.slow
def test_an_installed_wheel_generates(run_installed):
    run_installed(INSTALLED + GENERATED)
