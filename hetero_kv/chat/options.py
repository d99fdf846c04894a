"""The chat command's flags, and the checks of their values."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetero_kv.contexts.names import require_name
from hetero_kv.contexts.settings import ContextCacheSettings
from hetero_kv.errors import ConfigError
from hetero_kv.rules.context_settings import context_settings
from hetero_kv.rules.precedence import COMMAND_LINE
from hetero_kv.rules.setting_flags import add_rules_flag, add_setting_flags, settings_of
from hetero_kv.rules.trust import trusted_modules
from hetero_kv.serving.sampling_settings import SamplingSettings
from hetero_kv.serving.speculation.ways import Way, require_way_or_model
from hetero_kv.settings.flags import FlagParser, add_loading_flags
from hetero_kv.settings.mapping import settings_from_mapping
from hetero_kv.settings.setting import Settings, setting


@dataclass(frozen=True)
class ModeSettings(Settings):
    """How the model is run."""

    mode: Literal["long_context", "normal"] = setting(
        "long_context", "long_context: with the operators of the rules; normal: the untouched model, for comparison"
    )


@dataclass(frozen=True)
class AnswerSettings(SamplingSettings):
    """How an answer is generated."""

    max_new_tokens: int = setting(512, "maximum length of an answer", unit="tokens", minimum=1)
    seed: int | Literal["random"] = setting("random", "makes sampling repeatable", minimum=0, maximum=2**63 - 1)
    speculation: Way | str = setting(
        "auto",
        "how the next tokens are guessed, several of which are then verified at a time: lookup: what followed the same "
        "words earlier; sparse: by the model itself, with attention to few blocks; the name or path of a draft model: "
        "by that small model of the same vocabulary; auto: lookup where the rules allow it; off: one token at a time; "
        "the answers are the same",
    )

    @property
    def fixed_seed(self) -> int | None:
        """The seed of every answer; None draws another one for each."""
        return None if self.seed == "random" else self.seed


@dataclass(frozen=True)
class ChatOptions:
    """The chat command's flags.

    Attributes:
        prompt: the question; None reads it from the terminal.
        prompt_file: texts that go before the question; `-` is standard input.
        model: name or path; None for the default model, or for the GGUF file if that is set.
        gguf_path: the file of the weights, if they are not in the model's folder.
        rules: path or name of a rules file, optionally followed by its own settings.
        context: name of the saved context that the conversation continues.
        save_context: the name that its context is saved under when the only answer, or the chat, has ended.
        stop: texts that end an answer.
        long_context: the settings of engine and operators on the command line, by name.
        trust_rules: modules whose operators the rules may name.
        flag_spellings: the command line's spellings of those settings.
        context_flags: the settings of saved contexts that are on the command line.
    """

    prompt: str | None
    prompt_file: tuple[Path, ...]
    system: str | None
    json: bool
    model: str | None
    gguf_path: str | None
    rules: str
    mode: Literal["long_context", "normal"]
    device: str
    dtype: str
    trust_remote_code: bool
    answer: AnswerSettings
    contexts: ContextCacheSettings
    context: str | None
    save_context: str | None
    stop: tuple[str, ...]
    long_context: dict[str, Any]
    trust_rules: tuple[str, ...]
    flag_spellings: tuple[str, ...]
    context_flags: tuple[str, ...]


def add_flags(parser: FlagParser) -> None:
    """Add the chat command's flags to `parser`."""
    parser.epilog = (
        "Flags may be spelled with dashes or underscores. Sources of settings, the first wins: --config's own "
        "(quest:block_size=32), these flags, the rules file, ~/.hetero_kv/config.yaml, the defaults shown. "
        "The exit status is 2 for a mistake in these, 130 after Ctrl-C."
    )
    question = parser.add_argument_group("question")
    question.add_argument("--prompt", metavar="TEXT", help="the question; in a terminal the chat continues after it")
    question.add_argument(
        "--prompt_file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a document before the first question: text, HTML, PDF or DOCX (- is standard input); may be repeated",
    )
    question.add_argument("--system", metavar="TEXT", help="system message (default: the model's own)")
    question.add_argument("--json", action="store_true", help="answer once, and print one JSON object")
    add_loading_flags(parser, default="a small one, fetched on first use")
    method = parser.add_settings("method", "mode", ModeSettings)
    add_rules_flag(method)
    contexts = parser.add_settings("contexts", "contexts", ContextCacheSettings)
    contexts.add_argument("--context", metavar="NAME", help="continue this saved context")
    contexts.add_argument("--save_context", metavar="NAME", help="save the context under this name at the end")
    answer = parser.add_settings("answer", "answer", AnswerSettings)
    answer.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that ends an answer; may be repeated",
    )
    add_setting_flags(parser, lambda flags: [flags.rules])


def chat_options(flags: argparse.Namespace) -> ChatOptions:
    """The checked flags.

    Raises:
        ConfigError: a value of the wrong type or out of range, bytes that are not text, or a setting that appears under
            two names.
    """
    values = {**vars(flags), "flag_spellings": tuple(flags.long_context), "context_flags": tuple(flags.contexts)}
    del values["owners"]
    values["prompt_file"] = tuple(flags.prompt_file)
    values["stop"] = tuple(flags.stop)
    for flag, text in (("prompt", flags.prompt), ("system", flags.system), *(("stop", text) for text in flags.stop)):
        _require_text(flag, text)
    if "" in flags.stop:
        raise ConfigError("--stop is empty, which would end every answer; give a text, or leave it out")
    values["mode"] = settings_from_mapping(ModeSettings, flags.mode, where=COMMAND_LINE).mode
    values["answer"] = settings_from_mapping(AnswerSettings, flags.answer, where=COMMAND_LINE)
    require_way_or_model(values["answer"].speculation)
    values["contexts"] = context_settings(ContextCacheSettings, flags.contexts)
    _require_rules_for_contexts(values, "context_cache" in flags.contexts)
    values["long_context"] = settings_of(flags)
    values["trust_rules"] = trusted_modules(flags)
    return ChatOptions(**values)


def _require_rules_for_contexts(values: dict[str, Any], sets_context_cache: bool) -> None:
    """Refuse contexts in a mode that cannot save them, and invalid names, before a model is loaded."""
    for flag in ("context", "save_context"):
        if values[flag] is not None:
            require_name(values[flag])
            if values["mode"] == "normal":
                raise ConfigError(f"--{flag} has no effect in --mode normal, which has no rules; leave one out")
    if sets_context_cache and values["contexts"].context_cache != "off" and values["mode"] == "normal":
        raise ConfigError("--context_cache has no effect in --mode normal, which has no rules; leave one out")


def _require_text(flag: str, value: str | None) -> None:
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        # Python decodes an invalid byte to a lone surrogate.
        byte = ord(error.object[error.start]) & 0xFF
        raise ConfigError(
            f"--{flag} is not UTF-8 text (character {error.start} is the byte 0x{byte:02x}); give it in UTF-8"
        ) from error
