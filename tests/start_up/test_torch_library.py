"""torch's library is loaded before torch is imported, while other threads run."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = """
import sys, threading, time
from pathlib import Path
from hetero_kv.start_up.torch_library import load_torch_library
done, turns = threading.Event(), []
def count():
    while not done.is_set():
        turns.append(time.perf_counter())
        time.sleep(0.001)
thread = threading.Thread(target=count)
thread.start()
start = time.perf_counter()
load_torch_library()
stop = time.perf_counter()
done.set()
thread.join()
assert "torch" not in sys.modules
print("libtorch_cpu.so" in Path("/proc/self/maps").read_text())
print(sum(start + 0.001 < turn < stop - 0.001 for turn in turns) > 3)
load_torch_library()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_is_loaded_while_another_thread_runs():
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("True\nTrue\n", "")


def test_a_process_without_torch_is_left_alone(monkeypatch):
    from hetero_kv.start_up import torch_library

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(torch_library.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch_library.ctypes, "CDLL", None)
    torch_library.load_torch_library()
