"""The plan of a server by its flags, as plain data that other processes can use."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hetero_kv.cache_home import cache_home
from hetero_kv.models.chat_template import thinking_variable
from hetero_kv.server.checked_flags import CheckedFlags
from hetero_kv.server.host import Host
from hetero_kv.server.keys import Keys
from hetero_kv.server.models_to_load import ModelsToLoad
from hetero_kv.server.served import ServedModel, ServedModels
from hetero_kv.server.settings import ServedContextSettings, ServerSettings
from hetero_kv.serving.sampling_settings import SamplingSettings


@dataclass(frozen=True)
class ServerPlan:
    """Everything that starts a server. It has hashes of the API keys, not the keys.

    Attributes:
        aliases: further names of models, as `--alias` gives them.
        origins: other origins whose pages may use the server.
    """

    models: ModelsToLoad
    settings: ServerSettings
    contexts: ServedContextSettings
    defaults: SamplingSettings
    keys: Keys
    aliases: Sequence[str]
    origins: Sequence[str]

    @classmethod
    def of(cls, flags: argparse.Namespace, checked: CheckedFlags) -> Self:
        """The plan of the flags of `hetero-kv serve`. Raises ConfigError for settings of rules that are not valid."""
        models = ModelsToLoad.of(flags)
        settings, defaults, contexts, keys = checked.settings, checked.defaults, checked.contexts, checked.keys
        return cls(models, settings, contexts, defaults, keys, flags.alias, flags.allow_origin)

    def host(self, served: Sequence[ServedModel]) -> Host:
        """The host for these models.

        Raises HeteroKVError for models without a switch that the defaults set, and for names that do not fit them.
        """
        if self.defaults.thinks is not None:
            # Models without the switch are refused now, not warned about with every answer.
            for each in served:
                thinking_variable(each.tokenizer)
        given = self.settings.file_folder
        folder = cache_home() / "files" if given == "auto" else Path(given).expanduser()
        models = ServedModels(served, _aliases(self.aliases, served[0]))
        return Host.of(models, self.settings, folder=folder, defaults=self.defaults, keys=self.keys)


def _aliases(words: Sequence[str], first: ServedModel) -> Mapping[str, str]:
    """Other name -> name, from `--alias`."""
    aliases = {}
    for word in words:
        name, equals, target = word.partition("=")
        aliases[name] = target if equals else first.id
    return aliases
