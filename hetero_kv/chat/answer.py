"""An answer and its statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_kv.engine.statistics import LayerStatistics
from hetero_kv.serving.stream import FinishReason


@dataclass(frozen=True)
class Statistics:
    """Times, token counts and memory of one turn.

    Attributes:
        prompt_tokens: tokens of this turn that were prefilled.
        context_tokens: tokens of the conversation after the answer.
        generated_tokens: tokens of the answer, including an end-of-turn token.
        time_to_first_token_s: seconds from the question to the first token.
        prefill_s: seconds until the prompt was processed, which yields the first token.
        decode_s: seconds for the tokens after the first.
        peak_dram_bytes: the process's largest resident size so far.
        peak_vram_bytes: the most GPU memory allocated so far; None without a GPU.
        kv_bytes: DRAM of the stored keys, values and representatives.
        kv_device_bytes: their additional memory on the model's device: ShadowKV's low-rank keys and exact chunks, and a
            GPU's copies of Initial and Local; 0 for the untouched model.
        drafted_tokens: guesses at the answer's tokens that were verified (speculation).
        accepted_tokens: how many of them were right.
        of_layers: the layers' statistics since the conversation began, name -> a value per layer
            (`HeteroCache.statistics`); only names for which some layer has a value.
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
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    of_layers: LayerStatistics = field(default_factory=dict)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of prefill."""
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second after the first; None if there is only one."""
        return (self.generated_tokens - 1) / self.decode_s if self.generated_tokens > 1 else None


@dataclass(frozen=True)
class Turn:
    """A turn's size in tokens.

    Attributes:
        question: the question, its document and the chat template's text around them; in the first turn the system
            message too.
        answer: the answer.
    """

    question: int
    answer: int


@dataclass(frozen=True)
class ChatAnswer:
    """A model's answer.

    Attributes:
        text: the answer without special tokens; thoughts before it stand between `<think>` and `</think>`.
        finish_reason: "end" of turn, a "stop_text", "max_new_tokens" reached, "stopped" (by the user, or because the
            output's reader has gone), or "full" (the store has no room).
        reasoning: the thoughts alone; "" if there are none.
        content: the answer without them.
    """

    text: str
    finish_reason: FinishReason
    statistics: Statistics
    reasoning: str = ""
    content: str = ""
