"""Puts the operators of rules into a model, and takes them out again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hetero_kv.adapter import bridge
from hetero_kv.adapter.capture_state import CaptureState
from hetero_kv.adapter.foreign import is_offloaded, require_own_weights
from hetero_kv.adapter.generation import guard_generation, unguard_generation
from hetero_kv.adapter.guard import guarded
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.quantized_experts import QuantizedExperts
from hetero_kv.adapter.quantized_matrix import QuantizedLinear
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.replacement import Operator
from hetero_kv.adapter.weight_settings import AS_STORED, AUTO
from hetero_kv.errors import ConfigError
from hetero_kv.gpu_ops.attention_backend import AttentionBackend, missing
from hetero_kv.planning.attention_place import AttentionPlace
from hetero_kv.rules.effect import require_precedence
from hetero_kv.rules.experts_device import experts_in_dram
from hetero_kv.rules.injection import Injection, PutForward
from hetero_kv.rules.matching import InjectionError, matched_rules, modules_of, named
from hetero_kv.rules.named_config import NamedConfig, config_in
from hetero_kv.rules.owners import flat_classes
from hetero_kv.rules.precedence import COMMAND_LINE, before
from hetero_kv.rules.rule_set import RuleSet
from hetero_kv.rules.sharing import SharedWeights
from hetero_kv.rules.unpacked import warn_of_unpacked
from hetero_kv.settings.engine_settings import CPU, GPU, SPLIT, EngineSettings
from hetero_kv.settings.mapping import canonical
from hetero_kv.settings.setting import SettingError


def inject(
    model: PreTrainedModel,
    rules: RuleSet | NamedConfig | str | Path,
    *,
    command_line: Mapping[str, Any] | None = None,
    settings_file: Mapping[str, Any] | None = None,
    trust_rules: Collection[str] = (),
) -> Injection:
    """Replace the modules that the rules match by operators, in place.

    Args:
        model: a loaded transformers model, in eval mode.
        rules: a rule set, or the path or name of a rules file, optionally with settings ("quest:block_size=32").
        command_line: settings that win over the rules file.
        settings_file: settings that the rules file wins over.
        trust_rules: user modules whose operators a rules file may name (`load_rules`).

    Returns a record of the changes; `eject(model)` undoes them exactly.

    Raises:
        ConfigError: a mistake in the rules file or in a setting, or a setting that no injected operator has.
        InjectionError: the model is injected already, or a rule matches nothing in it.
        UnsupportedModelError: an operator cannot compute a matched module exactly, or this process has only a part of
            the model's weights (FSDP, tensor parallelism); the message gives the reason.
    """
    return _injected(model, config_in(rules, trust_rules), command_line, settings_file)


def inject_beside(
    model: PreTrainedModel, rules: NamedConfig, *, settings_file: Mapping[str, Any] | None = None
) -> Injection:
    """Inject rules into a new model that computes with the weights of `model`, whose own rules stay as they are.

    Modules, config and rules are the new model's own (`Injection.model`), parameters, buffers and packed weights are
    the same memory. Adapters and hooks that are added later belong to one of the two.

    Raises as `inject`, and InjectionError if the rules store weights differently from those of `model`, or the weights
    cannot be shared.
    """
    present: Injection | None = getattr(model, "hetero_kv_injection", None)
    # A forward may exchange parts of modules while it runs.
    with nullcontext() if present is None else present.one_at_a_time:
        weights = SharedWeights(model)
        injection = _injected(weights.copied(), rules, None, settings_file, weights)
    if present is not None:
        injection.digests = present.digests
    return injection


def _injected(
    model: PreTrainedModel,
    config: NamedConfig,
    command_line: Mapping[str, Any] | None,
    settings_file: Mapping[str, Any] | None,
    shared: SharedWeights | None = None,
) -> Injection:
    if getattr(model, "hetero_kv_injection", None) is not None:
        raise InjectionError(
            f"{type(model).__name__} has rules injected already; call hetero_kv.eject(model) before injecting others"
        )
    require_own_weights(model)
    rule_set = config.rules
    flags = canonical(flat_classes(rule_set.known_owners()), command_line, where=COMMAND_LINE)
    command_line = before(config.settings, flags)
    sources = {"command_line": command_line, "settings_file": settings_file}
    engine = rule_set.engine_in_force(**sources)
    plan, skipped = matched_rules(model, rule_set)
    modules = modules_of(model)
    matched = ((rule, cls, path, modules[path]) for path, (rule, cls) in plan.items())
    settings = rule_set.modules_in_force(matched, **sources)
    require_precedence(rule_set.file.long_context, rule_set.file.name, settings.values())
    injected = ((rule, cls, settings[path].settings) for path, (rule, cls) in plan.items())
    rule_set.require_effect(command_line, injected, skipped)
    weights = {
        path: settings[path].settings.weights for path, (_, cls) in plan.items() if issubclass(cls, QuantizedModule)
    }
    if shared is not None:
        shared.require_equal(weights)
    offloaded = is_offloaded(model)
    experts = {path: modules[path] for path, (_, cls) in plan.items() if issubclass(cls, QuantizedExperts)}
    applicable = experts_in_dram(model, experts, engine.settings, rule_set.file.name) | {
        path
        for path, (_, cls) in plan.items()
        if cls.applies(modules[path], settings[path].settings)
        and not (offloaded and issubclass(cls, QuantizedModule) and cls.parameter_of(modules[path]).is_meta)
    }
    left = [path for path in plan.keys() - applicable if issubclass(plan[path][1], QuantizedModule)]
    warn_of_unpacked(model, [modules[path] for path in left if settings[path].settings.weights in (AUTO, AS_STORED)])
    plan = {path: both for path, both in plan.items() if path in applicable}
    for path, (rule, _) in plan.items():
        if isinstance(model.get_submodule(path), QuantizedModule):
            raise InjectionError(
                f"{rule.title}: the weights of {path} stay packed under all rules; leave weights auto, or unpack the "
                "model (hetero-kv eval --unpacked)"
            )
    backend = engine.settings.attention_backend
    if lacking := missing(backend):
        raise SettingError("attention_backend", backend, lacking)
    injection = Injection(
        model, engine.settings, attention=AttentionBackend(backend), place=AttentionPlace(engine.settings.attend_on),
        captures=CaptureState(engine.settings.cuda_graphs),
    )  # fmt: skip
    injection.weights = weights
    injection.sources = {"": engine.sources, **{path: settings[path].sources for path in plan}}
    try:
        # The deepest modules first: a replaced parent would change its children's paths.
        for path in sorted(plan, key=lambda path: -path.count(".")):
            with named(plan[path][0]):
                operator = plan[path][1](path, model.get_submodule(path), settings[path].settings, injection.engine)
            operator.install()
            model.set_submodule(path, operator)
            operator.be_in_place()
            injection.operators[path] = operator
        if isinstance(head := model.get_output_embeddings(), QuantizedLinear):
            head.gives_logits = True
        if shared is not None:
            shared.give(injection.operators)
        # Behind the operators' own refusals, which say more.
        _require_reader_of_attend_on(engine.settings, [cls for _, cls in plan.values()], rule_set.file.name)
        _require_index(engine.settings, list(injection.operators.values()), rule_set.file.name)
        _configure_together(model, [injection.operators[path] for path in plan])
    except BaseException:
        _take_out(model, injection)
        raise
    injection.operators = {path: injection.operators[path] for path in plan}
    injection.rules = {path: rule for path, (rule, _) in plan.items()}
    # Attention that no rule replaces, outside of layers that run in chunks, needs the masks that the model builds.
    builders = _mask_builders(model, injection.operators) if injection.needs_cache else []
    injection.configs = [(holder, holder.config) for holder in builders]
    _guard(injection)
    model.hetero_kv_injection = injection
    return injection


def _require_reader_of_attend_on(engine: EngineSettings, operators: Sequence[type[Operator]], rules: str) -> None:
    """Raise ConfigError where `attend_on` changes nothing, because no operator reads it."""
    if engine.attend_on in (GPU, SPLIT) and not any(
        issubclass(each, AttentionOperator) and each.reads_attend_on for each in operators
    ):
        raise ConfigError(
            f"attend_on is {engine.attend_on}, but {rules} injects no RetrievalAttention or TokenRetrievalAttention, "
            "which alone read it; set attend_on to cpu"
        )


def _require_index(engine: EngineSettings, operators: Sequence[Operator], rules: str) -> None:
    """Raise ConfigError for an `index_device` that changes nothing, or contradicts `attend_on`."""
    if engine.index_device == CPU and engine.attend_on in (GPU, SPLIT):
        raise ConfigError(
            f"index_device is cpu, but attend_on is {engine.attend_on}, and a GPU that attends also chooses; set one "
            "of them"
        )
    if engine.index_device == GPU and not any(
        isinstance(each, AttentionOperator) and each.indexes_on_gpu for each in operators
    ):
        raise ConfigError(
            f"index_device is gpu, but under {rules} no layer chooses blocks that a GPU scores; set index_device to "
            "auto"
        )


def eject(model: PreTrainedModel) -> None:
    """Restore the modules and configs of a model that `inject` changed.

    Raises InjectionError when it has no rules injected, or when other code has wrapped an injected module or forward.
    """
    injection: Injection | None = getattr(model, "hetero_kv_injection", None)
    if injection is None:
        raise InjectionError(f"{type(model).__name__} has no rules injected, there is nothing to eject")
    for guard in injection.guards:
        guard.require_there()
    _require_in_place(model, injection)
    # A running forward of another thread finishes under its rules.
    with injection.one_at_a_time:
        _take_out(model, injection)
        del model.hetero_kv_injection


def eject_around_packed_weights(model: PreTrainedModel) -> None:
    """As `eject`, but operators that keep weights packed stay in the model permanently.

    Rules that are injected later see the modules that these operators replaced.

    Raises InjectionError when the model has no rules injected.
    """
    injection: Injection | None = getattr(model, "hetero_kv_injection", None)
    if injection is not None:
        operators = injection.operators.items()
        injection.operators = {path: each for path, each in operators if not isinstance(each, QuantizedModule)}
    eject(model)


@contextmanager
def suspended(model: PreTrainedModel) -> Iterator[None]:
    """Eject the model's rules, if any, within this context, and inject them again at its end.

    The operators are the same objects, so caches made under them stay valid.
    """
    injection: Injection | None = getattr(model, "hetero_kv_injection", None)
    if injection is None:
        yield
        return
    eject(model)
    try:
        yield
    finally:
        for path, operator in sorted(injection.operators.items(), key=lambda item: -item[0].count(".")):
            operator.install()
            model.set_submodule(path, operator)
        _guard(injection)
        model.hetero_kv_injection = injection


def _configure_together(model: nn.Module, operators: Sequence[Operator]) -> None:
    """Call `configure_together` of every class of attention and experts once all operators are in the model."""
    attentions = [each for each in operators if isinstance(each, AttentionOperator)]
    for attention_class in dict.fromkeys(type(operator) for operator in attentions):
        attention_class.configure_together(attentions)
    QuantizedExperts.configure_together(model, [each for each in operators if isinstance(each, QuantizedExperts)])


def _guard(injection: Injection) -> None:
    """Guard the forward of the modules that build masks, and disable their mask building."""
    for holder, config in injection.configs:
        holder.config = bridge.with_implementation(config)
        injection.guards.append(PutForward.on(holder, guarded(holder, injection, has_head=False)))
    # With the head: a failure after the layers is rolled back too, and policies may read logits.
    if all(injection.model is not holder for holder, _ in injection.configs):
        injection.guards.append(PutForward.on(injection.model, guarded(injection.model, injection, has_head=True)))
    for module in (injection.model, *(holder for holder, _ in injection.configs)):
        # Pickle and copy look it up on the instance; a copy would share this model's guards.
        module.__reduce_ex__ = injection.__reduce_ex__  # type: ignore[method-assign, unused-ignore]
    if injection.needs_cache:
        guard_generation(injection.model, injection.new_cache)


def _take_out(model: nn.Module, injection: Injection) -> None:
    for path, operator in sorted(injection.operators.items(), key=lambda item: item[0].count(".")):
        model.set_submodule(path, operator.uninstall())
    for holder, config in injection.configs:
        holder.config = config
        holder.__dict__.pop("__reduce_ex__", None)
    injection.model.__dict__.pop("__reduce_ex__", None)
    unguard_generation(injection.model)
    while injection.guards:
        injection.guards.pop().take_away()


def _require_in_place(model: nn.Module, injection: Injection) -> None:
    """Raise InjectionError if an operator was moved or replaced, or if the module that it wraps was wrapped again."""
    for path, operator in injection.operators.items():
        try:
            there: Any = model.get_submodule(path)
        except AttributeError:
            there = None
        if there is not operator:
            raise InjectionError(
                f"{path} is {'missing' if there is None else 'a ' + type(there).__name__}, where inject put "
                f"{type(operator).__name__}; undo that, then call hetero_kv.eject(model)"
            )
        operator.require_removable()


def _mask_builders(model: nn.Module, operators: dict[str, Operator]) -> list[Any]:
    """The modules that build the attention mask of replaced layers: the nearest enclosing transformers model of each.

    Modules with packed weights count only if nothing else is replaced: a head is outside the module that builds masks.
    """
    builders: dict[int, Any] = {}
    layers = [path for path, operator in operators.items() if not isinstance(operator, QuantizedModule)]
    for path in layers or operators:
        parts = path.split(".")
        for depth in range(len(parts) - 1, -1, -1):
            ancestor = model.get_submodule(".".join(parts[:depth]))
            if isinstance(ancestor, PreTrainedModel):
                builders[id(ancestor)] = ancestor
                break
    return list(builders.values())
