"""Numba kernels of the CPU: plain functions over numpy arrays, with no knowledge of models or settings.

Import this package before torch: OpenMP reads how long its threads spin, and torch in which pages its tensors lie, only
when they are loaded.
"""

import os

# GNU OpenMP spins for milliseconds by default. When another program wants a core too, a kernel's threads then wait for
# each other to be scheduled: calls of 0.06 ms took 4 to 8 ms. A short spin bridges the gaps inside a token as well.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# What layers make of a prompt's chunk has tens of MB, which malloc gives back to the system each time and gets anew: a
# page fault for every 4 KB, some third of a prompt's activation functions. In pages of 2 MB there are few.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
