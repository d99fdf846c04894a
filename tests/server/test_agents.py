"""A coding agent works by the server and the default model: its tools are called, and its turns reuse the earlier ones.

MINI_SWE_AGENT=PROGRAM python -m pytest -m slow tests/server/test_agents.py
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import yaml

from hetero_kv.models import DEFAULT_MODEL
from tests.server.test_process import started

pytestmark = [pytest.mark.slow, pytest.mark.model]

CONFIG = {
    "agent": {
        "system_template": "You solve tasks by calling the bash tool.",
        "instance_template": "{{task}}",
        "step_limit": 3,
        "cost_limit": 0,
        "mode": "yolo",
    },
    "environment": {"env": {}},
    "model": {"model_kwargs": {"temperature": 0, "max_tokens": 100, "drop_params": True}},
}
TASK = "Call the bash tool with this command: echo hello > greeting.txt"


@pytest.mark.skipif("MINI_SWE_AGENT" not in os.environ, reason="`make test-agents` installs mini-swe-agent")
def test_mini_swe_agent_writes_a_file(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    with started(tmp_path, "--model", DEFAULT_MODEL, "--max_seq_len", "4096", "--alias", "*") as (_, address):
        command = [
            os.environ["MINI_SWE_AGENT"], "-c", tmp_path / "config.yaml", "-m", "openai/local", "-t", TASK, "-y",
            "--exit-immediately", "-o", tmp_path / "told.json",
        ]  # fmt: skip
        environment = {
            **os.environ, "HOME": str(tmp_path), "OPENAI_API_BASE": f"{address}/v1", "OPENAI_API_KEY": "none",
            "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
        }  # fmt: skip
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=900, check=False)
    assert (tmp_path / "greeting.txt").read_text() == "hello\n"
    usages = [
        message["extra"]["response"]["usage"]
        for message in json.loads((tmp_path / "told.json").read_text())["messages"]
        if message["role"] == "assistant"
    ]
    first, second = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[:2])
    assert first < second
    assert second >= usages[0]["prompt_tokens"] - 1
