"""Numba kernels of the CPU: plain functions over numpy arrays, with no knowledge of models or settings.

OpenMP reads how long its threads spin when it is loaded, with torch; where that came first, it is brought to spin
briefly all the same (`openmp.spin_briefly`). Torch reads in which pages its tensors lie when the first one is made.
"""

import os
import sys

from cpu_ops import openmp

#: How often a waiting thread looks before it sleeps.
SPINS = 300

# GNU OpenMP spins for milliseconds by default. When another program wants a core too, a kernel's threads then wait for
# each other to be scheduled: calls of 0.06 ms took 4 to 8 ms. Spins of some microseconds bridge the gaps inside a token
# as well, and where a core is another program's the thread lets it have it.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    if "torch" in sys.modules:
        openmp.spin_briefly()

# What layers make of a prompt's chunk has tens of MB, which malloc gives back to the system each time and gets anew: a
# page fault for every 4 KB, some third of a prompt's activation functions. In pages of 2 MB there are few.
if "THP_MEM_ALLOC_ENABLE" not in os.environ:
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    if "torch" in sys.modules:
        openmp.warn_of_small_pages()
