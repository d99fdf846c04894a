"""A chat session: the loaded model with its rules, and a conversation with it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hetero_kv.adapter.loaded_weights import LoadedWeights
from hetero_kv.chat.conversation import Conversation
from hetero_kv.chat.options import ChatOptions
from hetero_kv.contexts.folder import open_store
from hetero_kv.contexts.prefix_cache import PrefixCache
from hetero_kv.contexts.saving import require_fit
from hetero_kv.contexts.settings import ADDRESS_FLAGS, is_address
from hetero_kv.contexts.store import ContextStore
from hetero_kv.loading import open_model
from hetero_kv.models import DEFAULT_MODEL, LoadedModel
from hetero_kv.planning.plan import beyond_training
from hetero_kv.rules.injection import Injection
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.precedence import COMMAND_LINE, SETTINGS_FILE, SettingsSource, in_force
from hetero_kv.rules.recipes import DEFAULT_RECIPE, display
from hetero_kv.rules.settings_file import ensure_settings_file, read_settings_file, settings_path
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.threads import set_threads

_logger = logging.getLogger(__name__)
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class OperatorSummary:
    """Operators of one kind with the same settings, and their places.

    Attributes:
        layers: the numbers of their layers; paths of modules outside layers.
        settings: setting -> value; None if the operator has no settings.
    """

    operator: str
    layers: list[int | str]
    settings: dict[str, Any] | None


@dataclass(frozen=True)
class ChatSession:
    """A model ready to chat.

    Attributes:
        engine: the engine's settings in force.
        injection: None in normal mode, where the model is untouched.
        rules_name: the rules file's name in messages; None in normal mode.
    """

    options: ChatOptions
    loaded: LoadedModel
    engine: EngineSettings
    injection: Injection | None
    rules_name: str | None
    conversation: Conversation

    @property
    def capacity(self) -> int:
        """The conversation's capacity in tokens; for the untouched model, its training context length."""
        return self.conversation.max_seq_len or self.loaded.context_length

    def contexts(self) -> ContextStore:
        """The saved contexts; close the store, or use it as a context manager."""
        return open_store(self.options.contexts)

    @cached_property
    def weights(self) -> LoadedWeights:
        """The sizes and types of the model's weights."""
        return LoadedWeights.of(self.loaded.model)

    def operators(self) -> list[OperatorSummary]:
        """The operators in the model, grouped by kind and settings."""
        summaries: list[OperatorSummary] = []
        for path, (name, settings) in self.injection.report().items() if self.injection else ():
            values = None if settings is None else asdict(settings)  # type: ignore[call-overload]
            same = [known for known in summaries if known.operator == name and known.settings == values]
            if not same:
                summaries.append(OperatorSummary(name, [], values))
            number = _LAYER.search(path)
            place = int(number[1]) if number else path
            layers = (same or summaries)[-1].layers
            # A layer has several linear modules.
            if place not in layers:
                layers.append(place)
        return summaries

    def settings_in_force(self) -> dict[str, Any]:
        """Engine, operators and sampling settings in use, with `auto` resolved."""
        present = self.injection.engine if self.injection else self.engine
        engine = asdict(present) | {"threads_num": present.resolved_threads()}
        if self.injection:
            engine["max_seq_len"] = self.capacity
        else:
            engine = {"threads_num": engine["threads_num"]}
        return {
            "engine": engine,
            "operators": [asdict(summary) for summary in self.operators()],
            "answer": asdict(self.options.answer),
            "device": str(self.loaded.model.device),
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
        }


def open_session(options: ChatOptions) -> ChatSession:
    """Load the model and rules of the options; write the settings file first if it does not exist.

    Raises:
        HeteroKVError: a mistake in the settings file or the rules, a model that cannot be loaded, rules that do not
            fit it, or a store that does not fit into memory. Rules and names of contexts are checked before the model
            opens; the model and rules of a saved context are checked before the weights load, which takes longer.
    """
    settings_file = _settings_file()
    config, with_rules = None, {}
    if options.mode == "long_context":
        config = named_config(options.rules, options.trust_rules)
        command_line = config.command_line(options.long_context)
        engine = config.rules.engine_settings(command_line=command_line, settings_file=settings_file)
        is_own_code = not (options.trust_rules or options.trust_remote_code)
        with_rules = {
            "config": config,
            "settings_file": settings_file,
            "keeps_trials": is_own_code,
            **options.long_context,
        }
    else:
        _warn_of_unused([*(["config"] if options.rules != DEFAULT_RECIPE else []), *options.flag_spellings])
        sources = [SettingsSource(COMMAND_LINE, options.long_context), SettingsSource(SETTINGS_FILE, settings_file)]
        engine = in_force(EngineSettings, sources, where="settings").settings
        set_threads(engine.resolved_threads())
    if unused := options.answer.unused:
        named = ", ".join(f"--{name}" for name in unused)
        _logger.warning("%s: no effect at temperature 0, where the likeliest token is taken; give a higher one", named)
    _require_contexts(options)
    model, gguf_path = options.model or DEFAULT_MODEL, options.gguf_path
    if options.model is None and gguf_path is not None:
        model, gguf_path = gguf_path, None
    opened = open_model(
        model,
        gguf_path=gguf_path,
        dtype=options.dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        **with_rules,
    )
    _require_fit(options, opened.model)
    loaded = opened.load()
    injection = getattr(loaded.model, "hetero_kv_injection", None)
    use = options.contexts.context_cache
    prefixes = None if use == "off" else PrefixCache(open_store(options.contexts), writes=use == "on")
    conversation = Conversation(
        loaded.model,
        loaded.tokenizer,
        system=options.system,
        thinks=options.answer.thinks,
        prefix_cache=prefixes,
        speculation=options.answer.speculation,
    )
    if warning := beyond_training(conversation.max_seq_len or 0, loaded.context_length):
        _logger.warning("max_seq_len: %s", warning)
    if options.context is not None:
        with open_store(options.contexts) as store:
            conversation.load_from(store, options.context)
    rules_name = display(config.rules.path) if config and config.rules.path else None
    return ChatSession(options, loaded, engine, injection, rules_name, conversation)


def warn_of_unused_contexts(options: ChatOptions) -> None:
    """Log the flags of saved contexts that have no effect on a single answer, which takes no commands."""
    needed = "--context, --save_context or --context_cache"
    given = [flag for flag in options.context_flags if flag != "context_cache"]
    if options.context is None and options.save_context is None and options.contexts.context_cache == "off":
        unused, reason = given, f"no effect without {needed}; give one of these"
    elif not is_address(options.contexts.context_folder):
        unused = [flag for flag in given if flag in ADDRESS_FLAGS]
        reason = "no effect on a folder of this machine; name an address with --context_folder"
    else:
        return
    if unused:
        _logger.warning("%s: %s", ", ".join(f"--{flag}" for flag in unused), reason)


def _settings_file() -> dict[str, Any]:
    path = settings_path()
    is_first_run = path is not None and not path.exists()
    if ensure_settings_file() is not None and is_first_run:
        _logger.warning("wrote %s, which lists every setting with its default", path)
    return read_settings_file()


def _require_contexts(options: ChatOptions) -> None:
    """Raise ContextError if the folder cannot hold contexts, or lacks the named context to load."""
    if options.context is None and options.save_context is None:
        return
    with open_store(options.contexts, makes=options.save_context is not None) as store:
        if options.context is not None:
            store.named(options.context)


def _require_fit(options: ChatOptions, model: Any) -> None:
    """Raise ContextError if the context to load belongs to another model or other rules."""
    if options.context is not None:
        with open_store(options.contexts) as store:
            require_fit(store.path(store.named(options.context)), model)


def _warn_of_unused(flags: Iterable[str]) -> None:
    unused = [f"--{flag}" for flag in flags if flag not in ("threads_num", "cpu_infer")]
    if unused:
        _logger.warning("%s: no effect in --mode normal, which has no rules", ", ".join(unused))
