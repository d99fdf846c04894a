"""Chooses a layer's tokens while the layer before computes, from that layer's input (InfiniGen, section 4.2).

The inputs of consecutive layers are similar, so a layer's query projection of the previous layer's input predicts its
queries. The prediction starts from the decoder layer's input, before normalisation, because each layer normalises with
its own weights. Blocks of the chosen tokens that are in a file are read in the meantime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hetero_kv.adapter import bridge
from hetero_kv.adapter.foreign import has_global_hooks, has_own_hooks
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.traced_qkv import traced_call
from hetero_kv.engine.step import Step
from hetero_kv.families.token_retrieval.choosers.chooser import ChosenTokens

if TYPE_CHECKING:
    from hetero_kv.families.token_retrieval.attention import TokenRetrievalAttention


class LookAhead:
    """Chooses the tokens of `operator` before it is called.

    On a GPU the guessed queries are copied to the CPU ahead of the queries of the layer before. The CPU chooses when
    the latter have arrived, so it waits for nothing more.
    """

    def __init__(self, operator: TokenRetrievalAttention, before: TokenRetrievalAttention) -> None:
        self._operator, self._before = operator, before
        self._sent: WeakKeyDictionary[Step, bridge.AttentionCall] = WeakKeyDictionary()
        self._chosen: WeakKeyDictionary[Step, ChosenTokens] = WeakKeyDictionary()

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose from the arguments of the previous attention module, for steps that have a choice."""
        operator = self._operator
        batch = bridge.cache_in(args, kwargs, operator.path).required_batch
        steps = [step for step in batch.steps if operator.chooses_in(step)]
        if not steps or not self._computes_where(args, kwargs) or self._has_hooks():
            return
        call = traced_call(operator.path, operator.wrapped, *self._as_its_own(args, kwargs))
        for step in steps:
            of_rows = call.of_rows(step.rows)
            # Asynchronous copies to "cpu" go to page-locked memory.
            self._sent[step] = replace(of_rows, q=of_rows.q.to("cpu", torch.float32, non_blocking=True))
            if not call.q.is_cuda:
                self.arrived(step)

    def _has_hooks(self) -> bool:
        """Whether hooks would observe the additional call of the layer, which an exception ends early."""
        modules = (self._operator.wrapped, self._operator.input_norm)
        return has_global_hooks() or any(
            has_own_hooks(part) for module in modules if module is not None for part in module.modules()
        )

    def _computes_where(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the weights are on the arguments' device; streamed weights arrive with their own layer."""
        argument = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        own = (each for each in (self._operator.wrapped, self._operator.input_norm) if each is not None)
        return argument.device.type == "cpu" or all(
            parameter.device == argument.device for module in own for parameter in module.parameters()
        )

    def _as_its_own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the previous layer's input, normalised by this operator's layer, as hidden states.

        Returns them unchanged if norm or input are unknown.
        """
        norm, previous = self._operator.input_norm, self._before.layer_input
        if norm is None or previous is None:
            return args, kwargs
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": norm(previous)}
        return (norm(previous), *args[1:]), kwargs

    def arrived(self, step: Step) -> None:
        """Choose for a step if its queries were sent; called when they, or later work of the device, are on the CPU."""
        call = self._sent.pop(step, None)
        if call is not None:
            self._chosen[step] = self._operator.chosen_for(step, call)

    def pop_choice(self, step: Step) -> ChosenTokens | None:
        """Returns a step's choice and forgets it; None if there was none."""
        return self._chosen.pop(step, None)


def link(operators: Sequence[AttentionOperator], kind: type[TokenRetrievalAttention]) -> None:
    """Let each operator of a `kind` whose chooser looks ahead use the previous operator of that kind.

    No operator uses the model's first layer, whose input differs from those of the others.
    """
    of_kind = sorted((each for each in operators if isinstance(each, kind)), key=lambda each: each.layer_idx)
    for before, operator in pairwise(of_kind):
        if before.layer_idx > 0 and operator.chooser is not None and operator.chooser.looks_ahead:
            operator.ahead = before.following = LookAhead(operator, before)
            before.changes_arguments = before.reads_hidden_states = True
