"""Numba kernels of the CPU: plain functions over numpy arrays, with no knowledge of models or settings.

This module sets OpenMP's spin time and torch's page size. OpenMP reads its spin time when it is loaded, with torch; if
torch is loaded already, `openmp.spin_briefly` shortens the spins. torch reads its page size at the first tensor.
"""

import os
import sys

if __name__ != "hetero_kv.cpu_ops":
    raise ImportError(f"{__name__} is a part of hetero_kv; import hetero_kv.cpu_ops")

from hetero_kv.cpu_ops import openmp

#: Spins of a waiting thread before it sleeps.
SPINS = 300

# GNU OpenMP spins for milliseconds by default. If another program needs a core too, a kernel's threads then wait for
# each other to be scheduled: calls of 0.06 ms took 4 to 8 ms. Spins of some microseconds leave the core to the other
# program, and to the kernels' own threads (`thread_team`), which bridge the gaps inside a token.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    if "torch" in sys.modules:
        openmp.spin_briefly()

# A prompt chunk's activations have tens of MB, which malloc returns to the system and allocates again each time. Page
# faults of 4 KB pages take a third of the time of a prompt's activation functions; pages of 2 MB have few faults.
if "THP_MEM_ALLOC_ENABLE" not in os.environ:
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    if "torch" in sys.modules:
        openmp.warn_of_small_pages()
