"""The sampling fields of requests, and the server's defaults for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hetero_kv.errors import ConfigError
from hetero_kv.server.errors import ApiError
from hetero_kv.server.served import ServedModel
from hetero_kv.serving.sampling import SamplingParams, TokenMask
from hetero_kv.serving.sampling_settings import SamplingSettings
from hetero_kv.serving.speculation.ways import require_way

#: The largest number of answers to one request.
MOST_CHOICES = 16
#: The largest number of stop texts.
MOST_STOPS = 64
# Fields that have an effect on streams alone.
_OF_STREAMS = ("stream_options", "return_progress", "return_tokens")


class Fields(BaseModel):
    """A request's body. Null leaves a field out. Unknown fields are kept, and named in the response's header."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name not in cls.model_fields}

    @property
    def unknown(self) -> list[str]:
        """Fields that have no effect."""
        return sorted(self.model_extra or {})


class StreamOptions(Fields):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class SamplingFields(Fields):
    """The sampling fields that OpenAI's APIs have in common, with llama-server's further ones."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=0)] = 0
    speculation: str | None = None
    user: Any = None

    def sampling(
        self, served: ServedModel, defaults: SamplingSettings, *, limit: int | None, limit_name: str = "max_tokens",
        logprobs: int | None = None, masks: Sequence[TokenMask | None] = (None,),
    ) -> list[SamplingParams]:  # fmt: skip
        """The parameters of each answer.

        Args:
            limit: the longest answer, tokens; None, or -1 as of llama-server, for as many as fit.
            limit_name: the request's field that has it.
            logprobs: the number of alternatives of each token; None for no log-probabilities.
            masks: a mask for each answer; the number of answers follows from it. Each prompt's answers have the same
                seeds.

        Raises ApiError 400 for a value out of range, naming its field.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS:
            raise ApiError(400, f"stop has {len(stops)} texts; give at most {MOST_STOPS}", param="stop")
        limit = None if limit == -1 else limit
        if limit is not None and limit < 1:
            raise ApiError(400, f"{limit_name} is {limit}; it must be at least 1", param=limit_name)
        penalty = self.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty
        chosen: dict[str, Any] = {
            "temperature": _or(self.temperature, defaults.temperature),
            "top_p": _or(self.top_p, defaults.top_p),
            # llama-server: all tokens.
            "top_k": max(0, _or(self.top_k, defaults.top_k)),
            "min_p": _or(self.min_p, defaults.min_p),
            "repetition_penalty": _or(penalty, defaults.repetition_penalty),
            "presence_penalty": _or(self.presence_penalty, defaults.presence_penalty),
            "frequency_penalty": _or(self.frequency_penalty, defaults.frequency_penalty),
            "logit_bias": self._biases(served.engine.vocab_size),
            "stop": tuple(stops),
            # The engine knows how many fit behind each prompt.
            "max_new_tokens": served.engine.max_seq_len if limit is None else limit,
            "logprobs": logprobs,
            "ignore_eos": self.ignore_eos,
        }
        seed = None if self.seed in (None, -1) else self.seed
        try:
            if self.speculation is not None:
                require_way(self.speculation, served.engine.ways)
            return [
                SamplingParams(
                    **chosen, seed=None if seed is None else (seed + number % self.choices) % 2**63, mask=mask
                )
                for number, mask in enumerate(masks)
            ]
        except ConfigError as error:
            # The message begins with the setting's name.
            raise ApiError(400, str(error), param=str(error).partition(" ")[0]) from error

    def ignored(self, served: ServedModel, defaults: SamplingSettings) -> list[str]:
        """Fields that have no effect: unknown ones, sampling fields of greedy requests, those of streams elsewhere.

        Also `speculation` where the model's rules allow no such guesses.
        """
        is_greedy = not _or(self.temperature, defaults.temperature)
        drawing = [name for name in ("top_p", "top_k", "min_p") if getattr(self, name) is not None]
        fields = type(self).model_fields
        streamed = [name for name in _OF_STREAMS if name in fields and getattr(self, name) and not self.stream]
        options = getattr(self, "stream_options", None) if self.stream and "stream_options" in fields else None
        why_not = None if self.speculation is None else served.engine.ways[self.speculation]
        return [
            *self.unknown,
            *([] if why_not is None else [f"speculation ({why_not})"]),
            *(f"{name} (temperature is 0)" for name in drawing if is_greedy),
            *(f"{name} (stream is false)" for name in streamed),
            *(f"stream_options.{name}" for name in (() if options is None else options.unknown)),
        ]

    @property
    def choices(self) -> int:
        """The number of answers. Raises ApiError 400 for too many."""
        if (self.n or 1) > MOST_CHOICES:
            raise ApiError(400, f"n is {self.n}; it must be at most {MOST_CHOICES}", param="n")
        return self.n or 1

    def _biases(self, vocab_size: int) -> dict[int, float]:
        try:
            biases = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise ApiError(
                400, "logit_bias has a name that is no token id; give numbers by token id", param="logit_bias"
            ) from None
        for token in biases:
            if not 0 <= token < vocab_size:
                raise ApiError(
                    400, f"logit_bias names token {token}; the model has tokens 0 to {vocab_size - 1}",
                    param="logit_bias",
                )  # fmt: skip
        return biases


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
