"""A layer's tokens chosen while the layer before it computes, from that one's input (InfiniGen, section 4.2).

The inputs of layers that follow each other are alike, so that a layer's projections of the one before say nearly what
it will ask for. These are the inputs of decoder layers, which only add to them: each normalises them for its attention
by weights of its own, and the layer before by others. Where blocks lie in a file, those of the chosen tokens are read
by the system meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hetero_kv.adapter import bridge
from hetero_kv.adapter.asked_call import call_of
from hetero_kv.adapter.foreign import has_global_hooks, is_heard_itself
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.engine.step import Step
from hetero_kv.families.token_retrieval.choosers.chooser import Choice

if TYPE_CHECKING:
    from hetero_kv.families.token_retrieval.attention import TokenRetrievalAttention


class LookAhead:
    """What is chosen for `operator` before it is called.

    On a GPU the guessed queries are sent to the CPU, which chooses when those of the layer before have come, behind
    them: there is nothing more to wait for.
    """

    def __init__(self, operator: TokenRetrievalAttention, before: TokenRetrievalAttention) -> None:
        self._operator, self._before = operator, before
        self._sent: WeakKeyDictionary[Step, bridge.AttentionCall] = WeakKeyDictionary()
        self._chosen: WeakKeyDictionary[Step, Choice] = WeakKeyDictionary()

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose from the arguments that the attention module before was called with, where there is a choice."""
        operator = self._operator
        steps = [step for step in bridge.cache_in(args, kwargs, operator.path).steps if operator.chooses_in(step)]
        if not steps or not self._computes_where(args, kwargs) or self._is_heard():
            return
        call = call_of(operator.path, operator.wrapped, *self._as_its_own(args, kwargs))
        for step in steps:
            of_rows = call.of_rows(step.rows)
            # Into page-locked memory, which torch takes for copies that do not block.
            self._sent[step] = replace(of_rows, q=of_rows.q.to("cpu", torch.float32, non_blocking=True))
            if not call.q.is_cuda:
                self.arrived(step)

    def _is_heard(self) -> bool:
        """Whether somebody would hear the layer called once more than it is, or its module left half-way."""
        modules = (self._operator.wrapped, self._operator.input_norm)
        return has_global_hooks() or any(
            is_heard_itself(part) for module in modules if module is not None for part in module.modules()
        )

    def _computes_where(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the weights are where the arguments are; streamed ones come with their own layer."""
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        own = (each for each in (self._operator.wrapped, self._operator.input_norm) if each is not None)
        return given.device.type == "cpu" or all(
            parameter.device == given.device for module in own for parameter in module.parameters()
        )

    def _as_its_own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, their hidden states those that the layer before was given, by the operator's own layer's norm.

        They stay as they are where that is not known.
        """
        norm, given = self._operator.input_norm, self._before.layer_input
        if norm is None or given is None:
            return args, kwargs
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": norm(given)}
        return (norm(given), *args[1:]), kwargs

    def arrived(self, step: Step) -> None:
        """The CPU has the queries of a step that were sent, or of later work of the device's: choose, if they were."""
        call = self._sent.pop(step, None)
        if call is not None:
            self._chosen[step] = self._operator.chosen_for(step, call)

    def taken(self, step: Step) -> Choice | None:
        """What was chosen for a step, once; None where nothing was."""
        return self._chosen.pop(step, None)


def link(operators: Sequence[AttentionOperator], kind: type[TokenRetrievalAttention]) -> None:
    """Let every operator of a `kind` whose chooser looks ahead do so from the one of that kind before it.

    None does from the model's first layer, whose input is unlike those behind it.
    """
    of_kind = sorted((each for each in operators if isinstance(each, kind)), key=lambda each: each.layer_idx)
    for before, operator in pairwise(of_kind):
        if before.layer_idx > 0 and operator.chooser is not None and operator.chooser.looks_ahead:
            operator.ahead = before.following = LookAhead(operator, before)
            before.changes_arguments = before.reads_hidden_states = True
