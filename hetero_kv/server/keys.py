"""API keys: which requests are allowed, and the name of each key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_kv.errors import ConfigError
from hetero_kv.server.errors import ApiError

#: The key's name if no key is needed.
ANYBODY = "anybody"


class Keys:
    """The server's API keys.

    Outside of this class a key has a name: the one in its file, or `key-` and eight digits of its hash.

    Args:
        keys: secrets, each as it is or as "name:secret".
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._names: dict[bytes, str] = {}
        for key in keys:
            name, colon, secret = key.partition(":")
            secret = secret if colon else key
            if len(secret) < 8 or not secret.isascii() or not secret.isprintable() or " " in secret:
                raise ConfigError(
                    "--api_key has a key that is no key; give at least 8 printable characters without white space, "
                    "optionally behind a name and a colon"
                )
            digest = _digest(secret)
            self._names[digest] = name if colon and name else f"key-{digest.hex()[:8]}"

    def __bool__(self) -> bool:
        return bool(self._names)

    def tenant(self, name: str) -> str:
        """The tenant of a key's stored contexts and kept sequences; "" if no key is needed."""
        return owner_of(name) if self._names else ""

    def name(self, headers: Mapping[str, str]) -> str:
        """The name of the key in a request's headers (`Authorization: Bearer`, or `x-api-key`).

        Raises ApiError 401 if a key is needed and is missing or unknown.
        """
        if not self._names:
            return ANYBODY
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        secret = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(secret)
        # In constant time, so that the time reveals nothing.
        found = [name for known, name in self._names.items() if hmac.compare_digest(known, digest)]
        if not secret or not found:
            reason = "is missing" if not secret else "is unknown"
            raise ApiError(
                401, f"the API key {reason}; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
            )  # fmt: skip
        return found[0]


def keys_in(path: Path) -> list[str]:
    """The keys in a file, one on a line; empty lines and those that begin with # are skipped.

    Raises ConfigError if it cannot be read or has none.
    """
    try:
        lines = [line.strip() for line in path.expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api_key_file {str(path)!r} cannot be read ({error}); give a text file") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"--api_key_file {str(path)!r} has no key; write one on a line")
    return found


def owner_of(name: str) -> str:
    """The owner that files on the disk record: a hash of the key's name."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
