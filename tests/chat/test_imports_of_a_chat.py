"""A chat imports neither torch's compiler nor its tensors of several processes, and torch compiles nevertheless."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHATTING = """
import sys
from hetero_kv.cli import run_command
status = run_command("chat", sys.argv[1:], is_program=True)
heavy = ["sympy", "torch._dynamo.eval_frame", "torch.distributed.fsdp", "torch.distributed.tensor"]
assert (status, [name for name in heavy if name in sys.modules]) == (0, [])

import torch
from transformers.integrations.flex_attention import WrappedFlexAttention
calls = []
torch._dynamo.allow_in_graph(abs)
compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: calls.append(graph) or graph)
assert compiled(torch.ones(1)).item() == 2
assert len(calls) == 1
"""


@pytest.mark.slow
def test_a_chat_imports_neither(tiny_model_folder: Path):
    words = ["--model", str(tiny_model_folder), "--dtype", "float32", "--prompt", "word1", "--max_new_tokens", "2"]
    done = subprocess.run([sys.executable, "-c", CHATTING, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
