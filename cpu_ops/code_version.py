"""A number that changes with the source of the kernels."""

import zlib
from pathlib import Path

from cpu_ops.kernel_cache import make_cache_safe

CODE_VERSION = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
"""Kernels close over it, so that it is part of their key in Numba's on-disk cache: Numba itself looks only at the file
a kernel is defined in, and would go on using kernels made with an older `simd.py`."""

# Whoever makes a kernel comes by here before Numba loads or saves one.
make_cache_safe()
