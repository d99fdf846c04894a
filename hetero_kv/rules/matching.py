"""Matches rules to a model's modules, and picks the operator class of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.recurrent import is_recurrent
from hetero_kv.adapter.replacement import Operator
from hetero_kv.errors import ConfigError, HeteroKVError, UnsupportedModelError, shown
from hetero_kv.rules.rule_file import nearest_module_paths
from hetero_kv.rules.rule_set import Rule, RuleSet


class InjectionError(HeteroKVError):
    """The rules cannot be applied to this model. The model is unchanged."""


@contextmanager
def named(rule: Rule) -> Iterator[None]:
    """Prefix errors within this context with the rule's title."""
    try:
        yield
    except (ConfigError, UnsupportedModelError) as error:
        if type(error) not in (ConfigError, UnsupportedModelError) or rule.title in str(error):
            raise
        raise type(error)(f"{rule.title}: {error}") from error


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module, as rules see it: for an operator with packed weights, the module that it replaces."""
    found: dict[str, nn.Module] = {}
    packed: list[str] = []
    for path, module in model.named_modules():
        if path and not path.startswith(tuple(packed)):
            found[path] = module
            if isinstance(module, QuantizedModule):
                found[path] = module.wrapped
                packed.append(f"{path}.")
    return found


#: Module path -> the rule and the operator class that the module gets.
MatchedRules = dict[str, tuple[Rule, type[Operator]]]


def matched_rules(model: nn.Module, rule_set: RuleSet) -> tuple[MatchedRules, list[Rule]]:
    """The rules and operators of modules, and the rules of attention that match modules without keys and values.

    Raises InjectionError if a rule matches nothing, or if a module that is not replaced could not work, and
    UnsupportedModelError if an operator cannot compute a module exactly.
    """
    modules = modules_of(model)
    unused = [rule for rule in rule_set.rules if not rule.optional]
    plan: MatchedRules = {}
    closed: list[str] = []
    skipped: list[Rule] = []
    for path, module in modules.items():
        matching = [rule for rule in rule_set.rules if rule.matches(path, module)]
        unused = [rule for rule in unused if rule not in matching]
        if not matching or any(path.startswith(f"{ancestor}.") for ancestor in closed):
            continue
        first = matching[0]
        if not first.recursive:
            closed.append(path)
        operator = first.operator
        if operator is None:
            continue
        if issubclass(operator, AttentionOperator) and (is_recurrent(module) or _is_other_mixer(path, module)):
            # Some models name a recurrent module, or an MLP, like their attention; it has no keys and values.
            skipped += [first] if all(first is not each for each in skipped) else []
            continue
        with named(first):
            operator_class = operator.operator_for(module)
            operator_class.require_suitable(path, module)
        plan[path] = (first, operator_class)
    if unused:
        rule = unused[0]
        pattern = rule.match_name.pattern if rule.match_name else None
        criteria = " and ".join(
            f"{key} {shown(value)}" for key, value in (("name", pattern), ("class", rule.match_class)) if value
        )
        near = (
            nearest_module_paths(pattern, list(modules))
            if pattern
            else sorted({type(m).__name__ for m in modules.values()})
        )
        raise InjectionError(
            f"{rule.title}: match: {criteria} matches no module of {type(model).__name__}; it has, for example, "
            f"{', '.join(near[:4] or list(modules)[:4])}"
        )
    has_attention = any(attention_module.is_attention(module) for module in modules.values())
    if skipped and not has_attention and not any(issubclass(cls, ChunkedDecoderLayer) for _, cls in plan.values()):
        raise InjectionError(
            f"{skipped[0].title}: it matches no module of {type(model).__name__} that has keys and values: the model "
            "keeps states alone; add a rule that makes its layers a ChunkedDecoderLayer, or leave it without rules"
        )
    _require_chunked(modules, plan)
    return plan, skipped


def _is_other_mixer(path: str, module: nn.Module) -> bool:
    """Whether it is what blocks with one module of any kind (Nemotron-H) have instead of attention."""
    return path.rpartition(".")[2] == "mixer" and not attention_module.is_attention(module)


def _require_chunked(modules: dict[str, nn.Module], plan: MatchedRules) -> None:
    """Raise InjectionError for an unreplaced module whose mask no layer builds, or whose state no layer carries."""
    chunked = [path for path, (_, cls) in plan.items() if issubclass(cls, ChunkedDecoderLayer)]
    replaced = [path for path, (_, cls) in plan.items() if issubclass(cls, AttentionOperator)]
    if not chunked and not replaced:
        return
    for path, module in modules.items():
        if is_recurrent(module):
            missing = "its state is not carried from chunk to chunk; add a rule for the layer"
        elif attention_module.is_attention(module):
            missing = "its causal mask is not built; add a rule for the layer, or replace the attention too"
        else:
            continue
        if any(path == r or path.startswith(f"{r}.") for r in replaced):
            continue
        if not any(path.startswith(f"{layer}.") for layer in chunked):
            raise InjectionError(
                f"{path} ({type(module).__name__}) is not replaced, but its layer is not a ChunkedDecoderLayer, so "
                f"{missing}"
            )
