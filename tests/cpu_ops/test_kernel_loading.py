"""A kernel is loaded from the cache without its bitcode and Numba's registries, until another kernel is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import numpy as np
from hetero_kv.cpu_ops import code_version, kernel_loading
from numba import float64, int64, njit

parse, parsed = kernel_loading.llvm.parse_bitcode, []
kernel_loading.llvm.parse_bitcode = lambda *arguments: parsed.append(arguments) or parse(*arguments)

@njit(float64[:](int64), cache=True)
def filled(number):
    return np.full(number, 2.0)

print(filled(3).sum(), len(parsed), "numba.np.linalg" in sys.modules)
if "outer" in sys.argv:
    @njit(float64(int64), cache=True)
    def outer(number):
        return filled(number).sum()

    print(outer(4), 0 < len(parsed))
"""


def test_a_loaded_kernel_is_called_and_inlined(tmp_path):
    program = tmp_path / "kernels.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}

    def printed(*words: str) -> list[str]:
        command = [sys.executable, str(program), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    printed()
    assert printed() == ["6.0 0 False"]
    assert printed("outer") == ["6.0 0 False", "8.0 True"]
    assert printed("outer") == ["6.0 0 False", "8.0 False"]
