"""The generation arguments of lm_eval's tasks (`until`, `max_gen_toks`, `do_sample`, …) as `SamplingParams`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hetero_kv.errors import ConfigError, shown
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.settings.setting import nearest_spelling

_logger = logging.getLogger(__name__)

# Names of one argument; lm_eval's own models know all of them.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Arguments that shape the distribution that a token is drawn from, and say nothing where the likeliest one is taken.
_OF_DRAWS = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_KNOWN = ("until", *_LENGTHS, "do_sample", *_OF_DRAWS, *_PENALTIES)


def sampling_params(arguments: Mapping[str, Any], longest: int, control_tokens: Mapping[str, int]) -> SamplingParams:
    """How the answer to one request is generated.

    Tokens are drawn where `do_sample` is true, or where it is missing and `temperature` is above 0; otherwise the
    likeliest is taken. Draws follow from torch's random generator, which lm_eval seeds (`--seed`).

    Args:
        arguments: a request's generation arguments.
        longest: the longest answer where they name none, tokens.
        control_tokens: the tokenizer's added tokens by text; one of them in `until` ends the answer as a token, because
            answers are decoded without them.

    Raises ConfigError for an unknown argument, a value outside its range, or arguments that contradict each other.
    """
    for name in arguments:
        if name not in _KNOWN:
            known = f"; known: {', '.join(_KNOWN)}"
            raise ConfigError(f"generation has no argument {name!r}{nearest_spelling(name, _KNOWN) or known}")
    given = {name: value for name, value in arguments.items() if value is not None}
    stop = _stop_texts(given.get("until", []))
    penalties: dict[str, Any] = {name: _number(name, given[name]) for name in _PENALTIES if name in given}
    return SamplingParams(
        max_new_tokens=_length(given, longest),
        stop=stop,
        ends=tuple(control_tokens[text] for text in stop if text in control_tokens),
        **_draws(given),
        **penalties,
    )


def _stop_texts(until: Any) -> tuple[str, ...]:
    texts = [until] if isinstance(until, str) else until
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"until is {shown(until)}; it must be a non-empty text or a list of such texts")
    return tuple(texts)


def _length(given: Mapping[str, Any], longest: int) -> int:
    named = {name: given[name] for name in _LENGTHS if name in given}
    if len(set(named.values())) > 1:
        values = " and ".join(f"{name} is {value}" for name, value in named.items())
        raise ConfigError(f"{values}, which mean the same; give max_gen_toks alone")
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {shown(value)}; it must be a whole number of at least 1")
        return value
    return longest


def _draws(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of drawing a token; none where the likeliest one is taken."""
    values = {name: _number(name, given[name]) for name in _OF_DRAWS if name in given}
    is_drawn = given.get("do_sample", values.get("temperature", 0.0) > 0)
    if not isinstance(is_drawn, bool):
        raise ConfigError(f"do_sample is {shown(is_drawn)}; it must be true or false")
    if not is_drawn:
        unused = {name: value for name, value in values.items() if value != _OF_DRAWS[name]}
        if unused:
            named = ", ".join(f"{name}={value:g}" for name, value in unused.items())
            _logger.warning("%s has no effect: without do_sample=true the likeliest token is taken", named)
        return {}
    if values.get("temperature") == 0:
        raise ConfigError("do_sample is true and temperature is 0; give a temperature above 0, or do_sample=false")
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    seed = int(torch.randint(2**63 - 1, ()))
    return {"temperature": 1.0, **values, "seed": seed}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is {shown(value)}; it must be a number")
    return value
