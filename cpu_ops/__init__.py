"""Numba kernels of the CPU: plain functions over numpy arrays, with no knowledge of models or settings.

Import this package before torch: OpenMP reads how long its threads spin only when it is loaded.
"""

import os

# GNU OpenMP spins for milliseconds by default. When another program wants a core too, a kernel's threads then wait for
# each other to be scheduled: calls of 0.06 ms took 4 to 8 ms. A short spin bridges the gaps inside a token as well.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
