"""Injects operators into a loaded model by rules, and ejects them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from gpu_ops.attention_backend import AttentionBackend, missing
from hetero_kv.adapter import attention_module, bridge
from hetero_kv.adapter.capture_state import CaptureState
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.foreign import is_offloaded, mark_own, require_own_weights
from hetero_kv.adapter.generation import guard_generation, unguard_generation
from hetero_kv.adapter.guard import guarded
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.replacement import Operator
from hetero_kv.adapter.weight_settings import AS_STORED, AUTO
from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.present_state import PresentState
from hetero_kv.contexts.saving import load_context, save_context
from hetero_kv.contexts.tensor_digests import TensorDigests
from hetero_kv.contexts.writing import Tokens
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.reservations import NOTHING_RESERVED, PLANNING, reserved_by_others
from hetero_kv.engine.resident_prefix import NO_RESIDENT_PREFIX, ResidentPrefix
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError, OutOfMemoryError
from hetero_kv.models import ProgressReport
from hetero_kv.planning.oom_error import ran_out_of_memory
from hetero_kv.planning.plan import Footprint, Plan, resolve_max_seq_len
from hetero_kv.rules.belonging import require_own, stray_cache
from hetero_kv.rules.effect import require_precedence
from hetero_kv.rules.matching import InjectionError, matched_rules, modules_of, named
from hetero_kv.rules.named_config import NamedConfig, config_in
from hetero_kv.rules.owners import flat_classes
from hetero_kv.rules.precedence import COMMAND_LINE, before
from hetero_kv.rules.preparing import Preparation
from hetero_kv.rules.rule_set import Rule, RuleSet
from hetero_kv.rules.unpacked import warn_of_unpacked
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.mapping import canonical
from hetero_kv.settings.setting import SettingError, Settings


@dataclass(frozen=True)
class PutForward:
    """A forward that the engine has set on a module instance.

    Attributes:
        before: the instance's earlier forward, such as accelerate's hook; None if the instance used its class's.
    """

    holder: nn.Module
    forward: Any
    before: Any

    @classmethod
    def on(cls, holder: nn.Module, forward: Any) -> PutForward:
        """Set `forward` on `holder`."""
        put = cls(holder, mark_own(forward), holder.__dict__.get("forward"))
        holder.__dict__["forward"] = forward
        return put

    def require_there(self) -> None:
        """Raise InjectionError if other code has replaced the forward since."""
        if self.holder.__dict__.get("forward") is not self.forward:
            raise InjectionError(
                f"the forward of {type(self.holder).__name__} was replaced after inject; undo that first "
                "(e.g. accelerate.hooks.remove_hook_from_module), then call hetero_kv.eject(model)"
            )

    def take_away(self) -> None:
        """Restore the earlier forward."""
        if self.before is None:
            self.holder.__dict__.pop("forward", None)
        else:
            self.holder.__dict__["forward"] = self.before


@dataclass
class Injection:
    """What `inject` did to a model.

    Attributes:
        engine: the engine's settings in force.
        operators: module path -> operator, in the model's order.
        rules: module path -> the rule that injected its operator.
        sources: module path -> the source of each of its operator's settings; "" -> the engine's.
        configs: the modules whose config a copy replaces, each with the original.
        guards: the forwards that wrap those of models.
        attention: the backend setting for attention on a GPU, and which backends have run.
        captures: whether decoding uses CUDA graphs, and which steps were captured.
        digests: digests of the model's weights, computed on first use.
        one_at_a_time: the lock that a thread takes during a forward, because operators are shared.
    """

    model: PreTrainedModel
    engine: EngineSettings
    operators: dict[str, Operator] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)
    sources: dict[str, dict[str, str]] = field(default_factory=dict)
    configs: list[tuple[Any, Any]] = field(default_factory=list)
    guards: list[PutForward] = field(default_factory=list)
    attention: AttentionBackend = field(default_factory=AttentionBackend)
    captures: CaptureState = field(default_factory=CaptureState)
    digests: TensorDigests = field(default_factory=TensorDigests)
    one_at_a_time: Any = field(default_factory=threading.RLock, repr=False, compare=False)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InjectionError(
            f"{type(self.model).__name__} has rules injected, and cannot be pickled or copied (torch.save, "
            "copy.deepcopy, multiprocessing): the copy's forward would be this model's; call hetero_kv.eject(model) "
            "first and inject the copy, or save its weights alone"
        )

    def report(self) -> dict[str, tuple[str, Settings | None]]:
        """Module path -> (operator's name, its settings)."""
        return {path: (type(operator).__name__, operator.settings) for path, operator in self.operators.items()}

    def attention_operators(self) -> Iterator[AttentionOperator]:
        """The operators that compute attention, in the model's order."""
        return (operator for operator in self.operators.values() if isinstance(operator, AttentionOperator))

    @property
    def is_in_place(self) -> bool:
        """Whether the model has this injection now."""
        return getattr(self.model, "hetero_kv_injection", None) is self

    @cached_property
    def needs_cache(self) -> bool:
        """Whether the model's layers require a HeteroCache; packed weights alone work with any cache."""
        kinds = AttentionOperator | ChunkedDecoderLayer
        return any(isinstance(operator, kinds) for operator in self.operators.values())

    def new_cache(self) -> HeteroCache:
        """An empty cache of the model."""
        return HeteroCache(self.model)

    def adopt(self, cache: HeteroCache) -> None:
        """Accept a cache of an earlier, equal injection. Raises HeteroKVError if they differ."""
        require_own(cache.injection, self)
        cache.injection = self

    def stray(self) -> HeteroKVError:
        """See CacheFactory."""
        return stray_cache(self)

    @property
    def context_length(self) -> int:
        """The length that the model was trained for, tokens."""
        return getattr(attention_module.text_config(self.model), "max_position_embeddings", None) or 1 << 20

    def bytes_per_token(self) -> float:
        """DRAM per token of one sequence, bytes, over all retrieval layers."""
        return Footprint.of(self).bytes_per_token.total

    def max_seq_len(
        self,
        requested: int | None = None,
        batch: int = 1,
        forks: int = 0,
        resident: ResidentPrefix = NO_RESIDENT_PREFIX,
        own: Store | None = None,
    ) -> int:
        """The capacity in tokens.

        Args:
            requested: the requested capacity; None for the setting `max_seq_len`.
            batch: sequences that are processed together, each with this capacity.
            forks: forks of the cache, each with this capacity too.
            resident: the resident prefix of the sequences.
            own: the store of the planned cache; reservations of other caches count as used. None ignores reservations.

        Raises OutOfMemoryError when it does not fit into the free memory.
        """
        plan = Plan.of(self, batch, forks, resident, NOTHING_RESERVED if own is None else reserved_by_others(own))
        return resolve_max_seq_len(self.engine.max_seq_len if requested is None else requested, plan)

    def planned_store(
        self, requested: int | None, batch: int, forks: int, resident: ResidentPrefix, own: Store | None
    ) -> Store:
        """See CacheFactory. Raises OutOfMemoryError as `max_seq_len`."""
        length = self.engine.max_seq_len if requested is None else requested
        with PLANNING:
            plan = Plan.of(self, batch, forks, resident, reserved_by_others(own))
            if plan.is_crowded(length):
                # Unreferenced caches may wait for the cycle collector.
                gc.collect()
                plan = Plan.of(self, batch, forks, resident, reserved_by_others(own))
            capacity = resolve_max_seq_len(length, plan)
            return Store(capacity, forks, plan.resident_dram(capacity), is_auto=length == "auto")

    def ran_out_of_memory(
        self, error: Exception, batch: int, *, stored: int, tokens: int, capacity: int | None, stored_bytes: int
    ) -> OutOfMemoryError:
        """See CacheFactory."""
        return ran_out_of_memory(
            lambda: Plan.of(self, batch),
            error,
            stored=stored,
            tokens=tokens,
            capacity=capacity,
            stored_bytes=stored_bytes,
            chunk_size=self.engine.chunk_size,
        )

    @property
    def identity(self) -> Identity:
        """What a context saved now depends on: model, weights, active modules and settings.

        Raises ContextError for hooks or tensors whose computation is unknown.
        """
        return Identity.of(self.model, self.attention_operators(), self.digests)

    def state(self) -> PresentState:
        """See CacheFactory."""
        return PresentState(self.model)

    def save(self, path: str | Path, cache: HeteroCache, tokens: Tokens | None) -> None:
        """See CacheFactory."""
        save_context(path, cache, tokens)

    def load(self, path: str | Path, **settings: Any) -> HeteroCache:
        """See CacheFactory."""
        return load_context(path, self.model, **settings).cache

    @cached_property
    def preparation(self) -> Preparation:
        """Compiles the kernels of every layer, before the first cache at the latest."""
        return Preparation(self.model, self.operators)

    def compile_kernels(self, progress: ProgressReport | None = None) -> None:
        """Compile the kernels of every layer now, so that the first answer does not wait. The weights are loaded.

        progress: see `Preparation.compile`.
        """
        self.preparation.compile(progress)

    def cache_layers(self) -> list[CacheLayerMixin]:
        """An empty cache layer per layer of the model: the operator's, or transformers' for a layer without one."""
        self.preparation.compile_for_first_cache()
        layers = list(DynamicCache(config=attention_module.text_config(self.model)).layers)
        for operator in self.attention_operators():
            if operator.layer_idx >= len(layers):
                raise InjectionError(
                    f"the model's config has {len(layers)} layers (num_hidden_layers), and {operator.path} is layer "
                    f"{operator.layer_idx}: layers were removed after inject; call hetero_kv.eject(model) before that"
                )
            layers[operator.layer_idx] = operator.new_cache_layer()
        return layers


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
    if getattr(model, "hetero_kv_injection", None) is not None:
        raise InjectionError(
            f"{type(model).__name__} has rules injected already; call hetero_kv.eject(model) before injecting others"
        )
    require_own_weights(model)
    config = config_in(rules, trust_rules)
    rule_set = config.rules
    flags = canonical(flat_classes(rule_set.known_owners()), command_line, where=COMMAND_LINE)
    command_line = before(config.settings, flags)
    sources = {"command_line": command_line, "settings_file": settings_file}
    engine = rule_set.engine_in_force(**sources)
    plan = matched_rules(model, rule_set)
    modules = modules_of(model)
    matched = ((rule, cls, path, modules[path]) for path, (rule, cls) in plan.items())
    settings = rule_set.modules_in_force(matched, **sources)
    require_precedence(rule_set.file.long_context, rule_set.file.name, settings.values())
    rule_set.require_effect(command_line, ((rule, cls, settings[path].settings) for path, (rule, cls) in plan.items()))
    offloaded = is_offloaded(model)
    applicable = {
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
        model, engine.settings, attention=AttentionBackend(backend), captures=CaptureState(engine.settings.cuda_graphs)
    )
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
        _configure_together(
            [operator for path in plan if isinstance(operator := injection.operators[path], AttentionOperator)]
        )
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


def _configure_together(operators: Sequence[AttentionOperator]) -> None:
    """Call `configure_together` of every class of `operators` once all are in the model."""
    for operator_class in dict.fromkeys(type(operator) for operator in operators):
        operator_class.configure_together(operators)


def _guard(injection: Injection) -> None:
    """Guard the forward of the modules that build masks, and disable their mask building."""
    for holder, config in injection.configs:
        holder.config = bridge.with_implementation(config)
        injection.guards.append(PutForward.on(holder, guarded(holder, injection, has_head=False)))
    # With the head: a failure behind the layers is rolled back too, and policies may read logits.
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
