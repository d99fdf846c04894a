"""A process with torch in it ends as every other does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENDING = """
import atexit, ctypes, sys, threading, time, types
from hetero_kv.ending import end
sys.modules["torch"] = types.ModuleType("torch")

class Freed:
    def __del__(self):
        print("freed")

sys.modules["torch"].kept = Freed()
atexit.register(print, "called at exit")
threading.Thread(target=lambda: time.sleep(0.05) or print("waited for")).start()
ctypes.CDLL(None).printf(b"of C\\n")
print("printed")
end(3)
"""


def ended(**streams: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.run([sys.executable, "-c", ENDING], text=True, env=environment, **streams)  # type: ignore[call-overload]


def test_it_waits_for_threads_calls_what_is_registered_and_writes_what_was_printed():
    done = ended(capture_output=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert sorted(done.stdout.splitlines()) == ["called at exit", "of C", "printed", "waited for"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_output_that_cannot_be_written_is_told_as_ever():
    with open("/dev/full", "w") as full:
        done = ended(stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 120
    assert "No space left on device" in done.stderr
