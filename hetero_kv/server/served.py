"""The models that a server offers: each with one recipe, and an engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from hetero_kv.errors import ConfigError
from hetero_kv.models.text_encoding import TextEncoder
from hetero_kv.models.turns import TurnTokens
from hetero_kv.server.errors import ApiError
from hetero_kv.server.limits import Gate
from hetero_kv.serving.answers import AnswerForm
from hetero_kv.serving.attended import Attended
from hetero_kv.serving.grammar import Grammars
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.status import EngineStatus
from hetero_kv.serving.stream import ResultStream, Stream


class ServedEngine(Protocol):
    """Computes the answers: `hetero_kv.serving.engine.Engine` in this process, or the replicas of a cluster.

    Members are those of `Engine`.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def ends(self) -> frozenset[int]: ...

    @property
    def ways(self) -> Mapping[str, str | None]: ...

    def status(self) -> EngineStatus: ...

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None, *, question: int | None = None,
        priority: int = 0, markers: Mapping[int, str] | None = None, reuses: bool = True,
        speculation: str | None = None, tenant: str = "",
    ) -> Stream: ...  # fmt: skip

    def attended(
        self, tokens: Sequence[int], position: int, *, prompt_tokens: int | None = None,
        bins: int | Sequence[int] = 256, priority: int = 0, tenant: str = "",
    ) -> ResultStream[Attended]: ...  # fmt: skip


@dataclass(frozen=True)
class ServedModel:
    """A model under one recipe.

    Attributes:
        model: the model's name in requests.
        recipe: the recipe's name in requests, after a colon.
        tokenizer: the model's.
        context_length: the length that the model was trained for, tokens.
        gate: admits requests to the engine.
    """

    model: str
    recipe: str
    tokenizer: Any
    context_length: int
    engine: ServedEngine
    gate: Gate
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the model's tokens."""
        return Grammars(self.tokenizer, self.engine.vocab_size, self.engine.ends)

    @cached_property
    def encoder(self) -> TextEncoder:
        """Tokens of texts without the chat template."""
        return TextEncoder(self.tokenizer)

    @cached_property
    def form(self) -> AnswerForm:
        """The format in which the model writes thoughts and tool calls."""
        return AnswerForm(self.tokenizer)

    @cached_property
    def turns(self) -> TurnTokens:
        """The model's chat template."""
        return TurnTokens(self.tokenizer)

    @property
    def id(self) -> str:
        """The name in requests: "qwen2.5-coder-0.5b-instruct:adaptive"."""
        return f"{self.model}:{self.recipe}"


class ServedModels:
    """All models of a server, by the names that requests give.

    A request names a model and a recipe (`model:recipe`), a model (its first recipe), a recipe (`:recipe`, of the first
    model), an alias, or nothing (the first model).

    Args:
        served: at least one; the first is the default.
        aliases: other name -> a name as above; "*" stands for all unknown names.
    """

    def __init__(self, served: Sequence[ServedModel], aliases: Mapping[str, str] | None = None) -> None:
        self.all = tuple(served)
        self._names: dict[str, ServedModel] = {"": self.all[0]}
        for each in self.all:
            if each.id in self._names:
                raise ConfigError(
                    f"two models would have the name {each.id}; give each model and recipe once, or rename a rules file"
                )
            self._names.setdefault(each.id, each)
            self._names.setdefault(each.model, each)
            self._names.setdefault(f":{each.recipe}", each)
        self._aliases = dict(aliases or {})
        for name, target in self._aliases.items():
            if target not in self._names:
                known = ", ".join(each.id for each in self.all)
                raise ConfigError(f"--alias {name}={target}: there is no model {target!r}; there are: {known}")

    @property
    def lengths(self) -> dict[str, int]:
        """The name of each model -> the longest request, prompt and answer, tokens."""
        return {each.id: each.engine.max_seq_len for each in self.all}

    def named(self, name: str | None) -> ServedModel:
        """The model that a request names.

        Raises ApiError 404 that lists the known names.
        """
        name = name or ""
        name = self._aliases.get(name, name)
        if name not in self._names:
            name = self._aliases.get("*", name)
        if name not in self._names:
            known = ", ".join(each.id for each in self.all)
            raise ApiError(
                404, f"there is no model {name!r} here; there are: {known}. `hetero-kv serve --alias {name}` gives the "
                "first one this name too", param="model", code="model_not_found",
            )  # fmt: skip
        return self._names[name]
