"""A hash of this package's code, by which what it kept on the disk is of its version."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

MODELS = Path(__file__).parent


@cache
def code_digest(*folders: Path) -> str:
    """The SHA-256, in hexadecimal, of all modules in these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
