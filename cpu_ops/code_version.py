"""A checksum of the kernels' source."""

import zlib
from pathlib import Path

from hetero_kv.cpu_ops.kernel_cache import make_cache_safe
from hetero_kv.cpu_ops.kernel_loading import load_less

CODE_VERSION = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
"""Kernels close over it, which makes it part of their key in Numba's on-disk cache. Numba itself checks only the file
that defines a kernel, and would reuse kernels compiled with an older `simd.py`."""

# Every module that compiles a kernel imports this one first.
make_cache_safe()
load_less()
