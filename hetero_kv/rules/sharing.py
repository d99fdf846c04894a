"""A second model over the weights of a loaded one, for the injection of other rules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hetero_kv.adapter.foreign import has_own_hooks, is_offloaded
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.replacement import Operator
from hetero_kv.adapter.weight_settings import AS_STORED, AUTO
from hetero_kv.rules.injection import Injection
from hetero_kv.rules.matching import InjectionError

# Attributes that `inject` and this package set on a model's modules; a copy gets its own.
_OURS = frozenset({"forward", "generate", "generate_batch", "init_continuous_batching", "__reduce_ex__"})
_INJECTION = "hetero_kv_injection"
_UNKNOWN = "numbers"


class SharedWeights:
    """The weights of a model, for another model that computes with the same memory.

    Args:
        model: a loaded model, with or without rules.

    Raises InjectionError while foreign hooks or forwards are in the model, which a copy could not run, or if other code
    loads its weights for each forward.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        injection: Injection | None = getattr(model, _INJECTION, None)
        self._is_injected = injection is not None
        if is_offloaded(model):
            raise InjectionError(
                f"other code brings the weights of {type(model).__name__} for each forward (accelerate's offloading), "
                "so that no other model can share them; load the model a second time"
            )
        hooked = [path for path, module in model.named_modules() if has_own_hooks(module)]
        if hooked:
            raise InjectionError(
                f"{hooked[0] or 'the model'} has a hook or a forward of others, which belongs to this model alone; "
                "share the weights before you add it"
            )
        self._packed = {path: each for path, each in model.named_modules() if isinstance(each, QuantizedModule)}
        self._weights = {} if injection is None else dict(injection.weights)
        self._weights |= {path: each.settings.weights for path, each in self._packed.items()}

    def copied(self) -> Any:
        """A model without rules, of modules of its own with this model's parameters and buffers.

        Modules whose weights a rule packs or converts have parameters on the meta device: `inject` replaces them by
        operators, and `give` shares the weights.
        """
        memo: dict[int, Any] = {}
        operators = [each for each in self._model.modules() if isinstance(each, Operator)]
        plain = [each for each in self._model.modules() if not isinstance(each, Operator)]
        for module in [*plain, *(each.wrapped for each in operators)]:
            kind: Any = type(module)
            memo[id(module)] = kind.__new__(kind)
            for owner in (module._parameters, module._buffers):
                memo |= {id(tensor): tensor for tensor in owner.values() if tensor is not None}
        # The deepest last: an operator may wrap one.
        for operator in operators:
            memo[id(operator)] = memo[id(operator.wrapped)]
        injection: Injection | None = getattr(self._model, _INJECTION, None)
        changed = [] if injection is None else [(holder.config, own) for holder, own in injection.configs]
        changed += [
            (each.wrapped.config, each._own_config) for each in operators if isinstance(each, AttentionOperator)
        ]
        for present, own in changed:
            memo[id(present)] = copy.deepcopy(own, memo)
        for module in [*plain, *(each.wrapped for each in operators)]:
            own_parts = {name: value for name, value in vars(module).items() if name not in _OURS | {_INJECTION}}
            vars(memo[id(module)]).update({name: copy.deepcopy(value, memo) for name, value in own_parts.items()})
        for each in self._packed.values():
            each.expect_weights_in(memo[id(each.wrapped)])
        return memo[id(self._model)]

    def require_equal(self, weights: Mapping[str, str]) -> None:
        """Raise InjectionError unless rules keep each module's weights as the model's own rules do.

        Args:
            weights: module path -> the setting `weights` in force.
        """
        missing = _UNKNOWN if self._is_injected else AUTO
        for path in sorted(self._weights.keys() | weights.keys()):
            mine, theirs = self._weights.get(path, missing), weights.get(path, _UNKNOWN)
            if self._kept(mine) != self._kept(theirs):
                raise InjectionError(
                    f"weights of {path} are {theirs!r} under these rules, and {mine!r} under those of the model whose "
                    "weights are shared; give both the same `weights`, or load the model a second time"
                )

    @staticmethod
    def _kept(weights: str) -> str:
        return AS_STORED if weights == AUTO else weights

    def give(self, operators: Mapping[str, Operator]) -> None:
        """Give the operators of `copied`'s model the weights of this model's.

        Raises InjectionError if there is none for a module whose weights an operator keeps.
        """
        for path, source in self._packed.items():
            target = operators.get(path)
            if target is None and source.keeps_numbers:
                # The copy has the same parameter, and needs no operator.
                continue
            if type(target) is not type(source):
                raise InjectionError(
                    f"the weights of {path} are packed, and these rules do not match it (an adapter around it?); share "
                    "the weights before you add adapters, or load the model a second time"
                )
            target.share_weights(source)
