"""Long contexts on ordinary machines: KV blocks in DRAM, sparse attention on the CPU, methods as YAML rules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Import this before torch: it sets OpenMP's spin time and the page size of tensors, which are read when torch loads.
from hetero_kv import cpu_ops  # noqa: F401
from hetero_kv.cpus import keep_threads_within_quota

if TYPE_CHECKING:
    from hetero_kv.chat.conversation import Conversation
    from hetero_kv.engine.cache import HeteroCache
    from hetero_kv.errors import HeteroKVError
    from hetero_kv.loading import load_model, open_model, with_rules
    from hetero_kv.rules.injecting import eject, inject
    from hetero_kv.rules.injection import Injection
    from hetero_kv.rules.rule_file import load_rules
    from hetero_kv.serving.engine import Engine
    from hetero_kv.serving.sampling import SamplingParams

keep_threads_within_quota()

__all__ = [
    "Conversation",
    "Engine",
    "HeteroCache",
    "HeteroKVError",
    "Injection",
    "SamplingParams",
    "eject",
    "inject",
    "load_model",
    "load_rules",
    "open_model",
    "with_rules",
]

_HOME = {
    "Conversation": "chat.conversation",
    "Engine": "serving.engine",
    "HeteroCache": "engine.cache",
    "HeteroKVError": "errors",
    "Injection": "rules.injection",
    "SamplingParams": "serving.sampling",
    "eject": "rules.injecting",
    "inject": "rules.injecting",
    "load_model": "loading",
    "load_rules": "rules",
    "open_model": "loading",
    "with_rules": "loading",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, and `--help` needs neither.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
