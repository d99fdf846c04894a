"""An answer, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hetero_kv.engine.statistics import LayerStatistics

FinishReason = Literal["end", "stop_text", "max_new_tokens", "stopped", "full"]


@dataclass(frozen=True)
class Statistics:
    """What one turn cost.

    Attributes:
        prompt_tokens: tokens of this turn that were prefilled.
        context_tokens: tokens of the conversation after the answer.
        generated_tokens: tokens of the answer, an end-of-turn token included.
        time_to_first_token_s: seconds from the question to the first token.
        prefill_s: seconds until the prompt was processed; the first token comes out of it.
        decode_s: seconds for the tokens after the first.
        peak_dram_bytes: the largest resident size of the process so far.
        peak_vram_bytes: the most GPU memory allocated so far; None without a GPU.
        kv_bytes: DRAM that the stored keys, values and representatives take.
        kv_device_bytes: memory that they take where the model computes, beside that: ShadowKV's low-rank keys and exact
            chunks, and a GPU's copies of Initial and Local; 0 for the untouched model.
        of_layers: what the layers have counted since the conversation began, name -> a value per layer
            (`HeteroCache.statistics`); only names under which some layer has a value.
    """

    prompt_tokens: int
    context_tokens: int
    generated_tokens: int
    time_to_first_token_s: float
    prefill_s: float
    decode_s: float
    peak_dram_bytes: int
    peak_vram_bytes: int | None
    kv_bytes: int
    kv_device_bytes: int
    of_layers: LayerStatistics = field(default_factory=dict)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of prefill."""
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second after the first; None when there was only one."""
        return (self.generated_tokens - 1) / self.decode_s if self.generated_tokens > 1 else None


@dataclass(frozen=True)
class Turn:
    """How many tokens of a conversation a turn is.

    Attributes:
        question: of the question, its document and what the chat template writes around them; the first turn's system
            message too.
        answer: of the answer.
    """

    question: int
    answer: int


@dataclass(frozen=True)
class Answer:
    """A model's answer.

    Attributes:
        text: without special tokens; where the chat template opened a thought, with its `<think>`.
        finish_reason: "end" of turn, a "stop_text", "max_new_tokens" reached, "stopped" by the user, or
            because nobody reads it, or the store is "full".
    """

    text: str
    finish_reason: FinishReason
    statistics: Statistics
