"""Requests made at random by the server's own OpenAPI document, by Schemathesis, are never a fault of the server's.

SCHEMATHESIS=PROGRAM SECONDS=300 python -m pytest -m slow tests/server/test_schema.py
"""

from __future__ import annotations

import os
import re
import subprocess

import httpx2 as httpx
import pytest

from tests.server.running import host_of, running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.skipif("SCHEMATHESIS" not in os.environ, reason="`make test-schema` installs Schemathesis")
def test_no_request_that_the_schema_describes_nearly_or_well_is_a_fault_of_the_server(served, tmp_path):
    program, seconds = os.environ["SCHEMATHESIS"], os.environ.get("SECONDS", "300")
    with running(host_of(served, folder=tmp_path)) as address:
        command = [
            program, "run", f"{address}/openapi.json", "--checks", "not_a_server_error", "--max-time", seconds,
            "--continue-on-failure", "--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off",
        ]  # fmt: skip
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        counts = re.findall(r"hetero_kv_requests_total\{.*\} (\d+)", httpx.get(f"{address}/metrics").text)
    assert found.returncode == 0, found.stdout[-8000:]
    assert sum(map(int, counts)) > 500
    assert served.engine.status().requests == ()
