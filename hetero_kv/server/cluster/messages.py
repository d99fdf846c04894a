"""What the ingress and the replicas of a cluster tell each other."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hetero_kv.serving.attended import Attended
from hetero_kv.serving.cluster.routing import RoutedRequest
from hetero_kv.serving.grammar import GrammarText
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.stream import Completion, Piece, Progress

_numbers = itertools.count()


@dataclass(frozen=True)
class RemoteRequest:
    """A request to the engine of a model at a replica.

    Attributes:
        model: the model's id.
        tokens: [tokens] int32.
        routed: what the router looks at.
        arguments: further arguments of `Engine.generate` or `Engine.attended`.
        sampling: of `generate`, without the mask, which is the replica's to make of `grammar`.
        avoided: replicas that have failed the request before.
        number: tells the ingress' requests apart.
    """

    model: str
    tokens: np.ndarray
    routed: RoutedRequest
    arguments: Mapping[str, Any]
    sampling: SamplingParams | None = None
    grammar: GrammarText | None = None
    avoided: Collection[str] = ()
    number: int = field(default_factory=_numbers.__next__)


@dataclass(frozen=True)
class Taken:
    """The replica computes the request."""

    replica: str


@dataclass(frozen=True)
class Alive:
    """The replica still computes the request. `progress` is of its prompt, None while it waits."""

    progress: Progress | None


@dataclass(frozen=True)
class NextPieces:
    """The next tokens of an answer."""

    pieces: Sequence[Piece]


#: What a replica sends: `Taken` at first, `Alive` while nothing else comes, the answer's tokens, and at the end the
#: result, a completion without the tokens that were sent, or an error that is the request's own.
Message = Taken | Alive | NextPieces | Completion | Attended | Exception


@dataclass(frozen=True)
class ModelFacts:
    """What the ingress has to know of a model, whose weights are at the replicas.

    Attributes:
        model, recipe, tokenizer, context_length: as of `ServedModel`.
        vocab_size, max_seq_len, ends, ways: as of `Engine`.
    """

    model: str
    recipe: str
    tokenizer: Any
    context_length: int
    vocab_size: int
    max_seq_len: int
    ends: frozenset[int]
    ways: Mapping[str, str | None]
