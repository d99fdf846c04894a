"""Which eviction policies there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hetero_kv.errors import HeteroKVError
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.bounded.eviction.settings import BoundedSettings
from hetero_kv.settings.setting import nearest_spelling

P = TypeVar("P", bound=type[EvictionPolicy])


@dataclass(frozen=True)
class RegisteredPolicy:
    """One eviction policy.

    Attributes:
        name: as written in YAML (`policy`).
        meaning: one line for the documentation.
        settings: the dataclass of its settings.
        policy: its class.
    """

    name: str
    meaning: str
    settings: type[BoundedSettings]
    policy: type[EvictionPolicy]


_REGISTRY: dict[str, RegisteredPolicy] = {}


def register(name: str, *, meaning: str, settings: type[BoundedSettings]) -> Callable[[P], P]:
    """Make the decorated subclass of EvictionPolicy known as policy `name`."""

    def keep(policy: P) -> P:
        _REGISTRY[name] = RegisteredPolicy(name, meaning, settings, policy)
        return policy

    return keep


def names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_REGISTRY))


def get(name: str) -> RegisteredPolicy:
    """The policy called `name`. Raises HeteroKVError for an unknown one."""
    if name not in _REGISTRY:
        raise HeteroKVError(
            f"policy {name!r} is not an eviction policy{nearest_spelling(name, names())}; known: {', '.join(names())}"
        )
    return _REGISTRY[name]
