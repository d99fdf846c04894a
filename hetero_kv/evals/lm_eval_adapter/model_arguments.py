"""The `model_args` of the model `hetero_kv`: which model and method, and how requests become prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch

from hetero_kv.errors import ConfigError, shown
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.rules.recipes import DEFAULT_RECIPE
from hetero_kv.rules.trusted_names import trusted_names

WHERE = "model_args"
#: The values of `truncation`.
REFUSE, LEFT = "refuse", "left"
_DEFAULT_BATCH = 8
# Of lm_eval's command.
_DEFAULT_DEVICE = "cuda:0"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelArguments:
    """Checked `model_args`.

    Attributes:
        pretrained, gguf_path, config, dtype, device, trust_remote_code, trust_rules: as in `hetero_kv.load_model`;
            `pretrained` is its `name_or_path`.
        batch: how many requests are answered at a time (`Engine(max_batch=)`).
        truncation: what is done about a request that does not fit into `max_seq_len`: "refuse" it, or cut its context
            from the "left".
        max_gen_toks: the longest answer where a task names none, tokens.
        decoded_context: how many of a context's last tokens are decoded before a continuation, instead of passing with
            the prompt. One token at least stays in the prompt.
        prefix_token_id: the token before a text without context; None for the tokenizer's BOS, else its EOS token.
        add_bos_token: whether a text gets the tokenizer's special tokens; None for the tokenizer's default.
        enable_thinking: whether the chat template lets a reasoning model think; None for the template's default.
        settings: settings of the rules, by name: `max_seq_len`, `block_size`, `threads_num`, …
    """

    pretrained: str = DEFAULT_MODEL
    gguf_path: str | None = None
    config: str = DEFAULT_RECIPE
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    trust_rules: tuple[str, ...] = ()
    batch: int = _DEFAULT_BATCH
    truncation: str = REFUSE
    max_gen_toks: int = 256
    decoded_context: int = 0
    prefix_token_id: int | None = None
    add_bos_token: bool | None = None
    enable_thinking: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parsed(
        cls, arguments: Mapping[str, Any], batch_size: int | str | None = None, max_batch_size: int | None = None
    ) -> Self:
        """The arguments of `lm_eval --model_args`, with its flags `--batch_size` and `--max_batch_size`.

        A name that is not an attribute of this class counts as a setting of the rules; `load_model` refuses unknown
        ones. An argument that is None counts as left out.

        Raises ConfigError for a wrong value, or two arguments that contradict each other, naming them.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        if "model" in given:
            if "pretrained" in given:
                raise ConfigError(
                    f"{WHERE}: model is {shown(given['model'])} and pretrained is {shown(given['pretrained'])}, which "
                    "mean the same; give one of them"
                )
            given["pretrained"] = given.pop("model")
        given["batch"] = _batch(given.get("batch"), batch_size, max_batch_size)
        names = {each.name for each in fields(cls)} - {"settings"}
        own = {name: value for name, value in given.items() if name in names}
        for name, value in own.items():
            fits, requirement = _CHECKS.get(name, _TEXT)
            if not fits(value):
                raise ConfigError(f"{WHERE}: {name} is {shown(value)}; it must be {requirement}")
        if "trust_rules" in own:
            own["trust_rules"] = trusted_names(own["trust_rules"], WHERE)
        return cls(**own, settings={name: value for name, value in given.items() if name not in names})


def device_of(argument: str | None, flag: str | None) -> str | None:
    """The device, from `device` in `model_args` and the flag `--device`, which lm_eval sets to "cuda:0" by default.

    As under lm_eval's own model `hf`, a machine without a GPU then computes on the CPU, and a warning says so.

    Raises ConfigError if both are given and differ.
    """
    if flag != _DEFAULT_DEVICE:
        if argument is not None and flag is not None and argument != flag:
            raise ConfigError(f"{WHERE}: device is {argument!r}, and --device is {flag!r}; give one of them")
        return flag if argument is None else argument
    if argument is None and not torch.cuda.is_available():
        _logger.warning(
            "--device is %s, by lm_eval's default or as given, and there is no GPU: computing on the CPU", flag
        )
        return "cpu"
    return flag if argument is None else argument


def _batch(batch: Any, batch_size: int | str | None, max_batch_size: int | None) -> Any:
    """The rows at a time, from the argument `batch` and the flags of lm_eval, whose `--batch_size` is 1 by default."""
    is_auto = isinstance(batch_size, str) and batch_size.partition(":")[0] == "auto"
    if max_batch_size is not None and not is_auto:
        raise ConfigError(
            f"max_batch_size is {max_batch_size}, and batch_size is {shown(batch_size)}; max_batch_size bounds "
            "batch_size=auto alone: leave it out, or give --batch_size auto"
        )
    if batch_size is None or is_auto:
        found = max_batch_size or _DEFAULT_BATCH
        return found if batch is None else batch
    try:
        rows = int(batch_size)
    except ValueError:
        raise ConfigError(
            f"batch_size is {shown(batch_size)}; it must be a whole number of at least 1, or auto"
        ) from None
    if batch is None:
        return rows
    if rows not in (1, batch):
        raise ConfigError(
            f"{WHERE}: batch is {shown(batch)}, and batch_size is {rows}, which mean the same; give one of them"
        )
    return batch


def _whole(minimum: int) -> tuple[Callable[[Any], bool], str]:
    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= minimum

    return fits, f"a whole number of at least {minimum}"


_Check = tuple[Callable[[Any], bool], str]
_TEXT: _Check = (lambda value: isinstance(value, str), "a text")
_SWITCH: _Check = (lambda value: isinstance(value, bool), "true or false")
_CHECKS: dict[str, _Check] = {
    "batch": _whole(1),
    "max_gen_toks": _whole(1),
    "decoded_context": _whole(0),
    "prefix_token_id": _whole(0),
    "trust_remote_code": _SWITCH,
    "add_bos_token": _SWITCH,
    "enable_thinking": _SWITCH,
    # trusted_names checks them.
    "trust_rules": (lambda value: True, ""),
    "truncation": (
        lambda value: value in (REFUSE, LEFT),
        f"{REFUSE!r}, or {LEFT!r} to cut the beginnings of contexts that do not fit",
    ),
}
