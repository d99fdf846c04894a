"""Counts and times of answers, in each API's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetero_kv.serving.stream import Completion, Progress

#: Why an answer ended, in OpenAI's terms.
FINISH_REASONS = {
    "end": "stop",
    "stop_text": "stop",
    "max_new_tokens": "length",
    "full": "length",
    "stopped": "stop",
}


def usage(completions: Sequence[Completion], choices: int = 1) -> dict[str, Any]:
    """OpenAI's `usage`; `choices` answers share a prompt, which counts once."""
    prompts = completions[::choices]
    prompt = sum(each.prompt_tokens for each in prompts)
    answer = sum(len(each.pieces) for each in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
    }


def timings(completion: Completion) -> dict[str, Any]:
    """llama-server's `timings`, ms; the prompt's time includes its wait for other requests."""
    prompt = completion.prompt_tokens - completion.cached_tokens
    first_ms = 1000 * (completion.first_token_s or 0.0)
    # Like llama-server, which omits them from answers without drafts.
    drafts = {"draft_n": completion.drafted_tokens, "draft_n_accepted": completion.accepted_tokens}
    behind, behind_ms = max(0, len(completion.pieces) - 1), 1000 * completion.total_s - first_ms
    return {
        "cache_n": completion.cached_tokens,
        "cache_reason": completion.reuse.reason,
        "cache_text": completion.reuse.text,
        "prompt_n": prompt,
        "prompt_ms": first_ms,
        "prompt_per_token_ms": first_ms / prompt if prompt else 0.0,
        "prompt_per_second": 1000 * prompt / first_ms if first_ms else 0.0,
        "predicted_n": len(completion.pieces),
        "predicted_ms": behind_ms,
        "predicted_per_token_ms": behind_ms / behind if behind else 0.0,
        "predicted_per_second": 1000 * behind / behind_ms if behind_ms > 0 else 0.0,
        **(drafts if completion.drafted_tokens else {}),
    }


def prompt_progress(progress: Progress) -> dict[str, Any]:
    """llama-server's `prompt_progress`."""
    return {
        "total": progress.prompt_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.processed_tokens,
        "time_ms": round(1000 * progress.elapsed_s),
    }
