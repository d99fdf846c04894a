"""The models and recipes that a server loads, as plain data, and the engines that it creates from them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from hetero_kv.cache_home import cache_home
from hetero_kv.loading import load_model, with_rules
from hetero_kv.models import DEFAULT_MODEL, LoadedModel
from hetero_kv.planning.plan import beyond_training
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.setting_flags import settings_of
from hetero_kv.rules.settings_file import read_settings_file
from hetero_kv.rules.trust import trusted_modules
from hetero_kv.server.limits import Gate
from hetero_kv.server.served import ServedModel
from hetero_kv.server.settings import ServedContextSettings, ServerSettings
from hetero_kv.serving.engine import Engine
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.speculation.opening import Guessing, load_draft
from hetero_kv.serving.speculation.vocabularies import difference
from hetero_kv.serving.speculation.ways import WAYS

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelsToLoad:
    """The models and recipes of a server. It can be sent to another process.

    Attributes:
        model, gguf_path: of the first model, as `load_model` takes them.
        recipes: rules of the first model; the first of them is also the further models'.
        also: further models, each "MODEL" or "MODEL=RECIPE".
        loading: arguments of `load_model` for all models.
        rules: settings of the rules, and what they may import.
    """

    model: str
    gguf_path: str | None
    recipes: Sequence[str]
    also: Sequence[str]
    loading: Mapping[str, Any]
    rules: Mapping[str, Any]

    @classmethod
    def of(cls, flags: argparse.Namespace) -> Self:
        """The models and recipes of the flags of `hetero-kv serve`. Raises ConfigError for invalid settings."""
        model, gguf_path = flags.model or DEFAULT_MODEL, flags.gguf_path
        if flags.model is None and gguf_path is not None:
            model, gguf_path = gguf_path, None
        trusted = trusted_modules(flags)
        return cls(
            model,
            gguf_path,
            flags.rules,
            flags.also,
            {
                "dtype": flags.dtype,
                "device": flags.device,
                "trust_remote_code": flags.trust_remote_code,
                "keeps_trials": not (trusted or flags.trust_remote_code),
            },
            {"trust_rules": trusted, "settings_file": read_settings_file(), **settings_of(flags)},
        )

    def load(
        self, settings: ServerSettings, contexts: ServedContextSettings, engines: ExitStack
    ) -> list[ServedModel]:  # fmt: skip
        """The first model under every recipe, and the further models, with engines that `engines` closes."""
        draft = _SharedDraft(settings.speculation)

        def serve(loaded: LoadedModel, recipe: str, *, is_further: bool = False) -> ServedModel:
            guessing = draft.for_further(loaded) if is_further else draft.of(loaded)
            engine = engines.enter_context(
                Engine(loaded, speculation=guessing, **_engine_arguments(settings, contexts))
            )
            if warning := beyond_training(engine.max_seq_len, loaded.context_length):
                _logger.warning("%s: max_seq_len: %s", loaded.name, warning)
            gate = Gate(settings.max_batch, settings.queue_length, settings.queue_s)
            name = named_config(recipe, self.rules["trust_rules"]).name
            return ServedModel(loaded.name, name, loaded.tokenizer, loaded.context_length, engine, gate)

        usual = self.recipes[0]
        first = load_model(self.model, gguf_path=self.gguf_path, config=usual, **self.loading, **self.rules)
        served = [serve(first, usual)]
        # The recipes share the weights.
        served += [serve(with_rules(first, recipe, **self.rules), recipe) for recipe in self.recipes[1:]]
        for word in self.also:
            name, _, recipe = word.partition("=")
            recipe = recipe or usual
            loaded = load_model(name, config=recipe, **self.loading, **self.rules)
            served.append(serve(loaded, recipe, is_further=True))
        return served


class _SharedDraft:
    """How a server's engines guess; a draft model is loaded once for all of them.

    Args:
        speculation: the server's setting.
    """

    def __init__(self, speculation: str) -> None:
        self._speculation = speculation
        self._loaded: LoadedModel | None = None

    def of(self, served: LoadedModel) -> Guessing:
        """How the engine of a model guesses. Raises as `load_draft`."""
        if self._speculation in WAYS or ModelForward(served.model).why_no_drafts is not None:
            return self._speculation
        if self._loaded is None:
            self._loaded = load_draft(self._speculation, served.model)
        return self._loaded

    def for_further(self, served: LoadedModel) -> Guessing:
        """The same for a model behind the first, which may have other tokens."""
        found = self.of(served)
        if isinstance(found, LoadedModel) and (other := difference(served.tokenizer, found.tokenizer)) is not None:
            _logger.warning("%s: speculation is auto, because the draft model has other tokens: %s", served.name, other)
            return "auto"
        return found


def _engine_arguments(settings: ServerSettings, contexts: ServedContextSettings) -> dict[str, Any]:
    """The arguments of engines that follow from the settings."""
    folder = cache_home() / "contexts" if contexts.context_folder == "auto" else contexts.context_folder
    return {
        "max_batch": settings.max_batch,
        "kept_prefixes": settings.kept_prefixes,
        "longest_gap_s": settings.longest_gap_s,
        "context_folder": None if contexts.context_cache == "off" else folder,
        "context_cache_gb": None if contexts.context_cache_gb == "all" else contexts.context_cache_gb,
        "context_local_gb": None if contexts.context_local_gb == "all" else contexts.context_local_gb,
        "context_wait_s": contexts.context_wait_s,
        "contexts_per_tenant": None if settings.contexts_per_key == "all" else settings.contexts_per_key,
    }
