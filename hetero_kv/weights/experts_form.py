"""How a module of a mixture's experts lays out its weights, and which rows it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Attributes of the modules of transformers' experts interface.
_INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclass(frozen=True)
class ExpertsForm:
    """The form of a module of experts.

    Attributes:
        has_gate: whether a merged gate and up projection comes first, instead of an up projection.
        has_bias: whether the projections have biases.
        is_transposed: whether the parameters' inputs are before their outputs.
        is_concatenated: whether gate and up follow each other, instead of alternating output by output.
        takes_all_rows: whether the module's forward takes [experts × tokens, hidden], every token scaled for each
            expert, by 0 for those that it does not have; other modules take tokens, their experts and shares.
    """

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    takes_all_rows: bool = False

    @classmethod
    def of(cls, module: Any) -> ExpertsForm | None:
        """A module's form; None if it has no experts of a known form."""
        if all(hasattr(module, name) for name in _INTERFACE):
            return cls(*(bool(getattr(module, name)) for name in _INTERFACE))
        return _OTHERS.get(type(module).__name__)


#: Class of experts without these attributes -> its form.
_OTHERS = {
    "Llama4TextExperts": ExpertsForm(
        has_gate=True, has_bias=False, is_transposed=True, is_concatenated=True, takes_all_rows=True
    )
}


def has_known_experts(module: Any) -> bool:
    """Whether a module has all experts of a mixture, in a known form."""
    return (
        ExpertsForm.of(module) is not None
        and hasattr(module, "num_experts")
        and not getattr(module, "_is_expert_parallel", False)
    )


def experts_in(model: Any) -> Iterator[Any]:
    """The modules of a model with a mixture's experts in a known form; operators in place of those that they wrap."""
    wrapped: set[int] = set()
    for module in model.modules():
        inner = getattr(module, "wrapped", module)
        if id(module) not in wrapped and has_known_experts(inner):
            wrapped.add(id(inner))
            yield module
