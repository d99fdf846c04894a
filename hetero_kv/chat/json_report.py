"""An answer as a JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hetero_kv.chat.answer import ChatAnswer
from hetero_kv.chat.session import ChatSession
from hetero_kv.rules.registered import layer_statistics


def json_report(session: ChatSession, answer: ChatAnswer) -> dict[str, Any]:
    """The answer, its statistics (names and units of `Statistics`), the weights' size, and the settings in force.

    The layers' statistics are top-level fields, with a value per layer; None if no layer has one. Speeds are None where
    there is nothing to measure, as after a prefill that Ctrl-C ended.
    """
    statistics = answer.statistics
    has_prefilled = statistics.generated_tokens > 0
    return {
        "answer": answer.text,
        "reasoning": answer.reasoning,
        "content": answer.content,
        "finish_reason": answer.finish_reason,
        "model": session.loaded.name,
        "mode": session.options.mode,
        "config": session.rules_name,
        "weight_bytes": session.weights.size,
        "weight_types": session.weights.in_short,
        "attention_backend": _attention_backend(session),
        "attend_on": _attention_place(session),
        "cuda_graphs": session.injection.captures.state if session.injection else None,
        **{name: value for name, value in asdict(statistics).items() if name != "of_layers"},
        **dict.fromkeys(layer_statistics()),
        **statistics.of_layers,
        "prefill_tokens_per_s": statistics.prefill_tokens_per_s if has_prefilled else None,
        "decode_tokens_per_s": statistics.decode_tokens_per_s,
        "settings": session.settings_in_force(),
    }


def _attention_place(session: ChatSession) -> str | None:
    """Where tokens attend to the Context under `attend_on: auto` or `split`, and why; None for other settings."""
    decision = session.injection.place.decision if session.injection else None
    return None if decision is None else str(decision)


def _attention_backend(session: ChatSession) -> str | None:
    """The kernels that computed dense attention on a GPU; None on a CPU, and for an untouched model."""
    used = session.injection.attention.used if session.injection else ()
    return ", ".join(sorted(kernel.value for kernel in used)) or None
