"""The rules that are injected into a model: its operators, and what plans, caches and saved contexts need of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.capture_state import CaptureState
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.foreign import mark_own
from hetero_kv.adapter.kept_trials import trials_kept
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.replacement import Operator
from hetero_kv.contexts.active_state import adapted_modules, effective_adapters
from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.present_state import PresentState
from hetero_kv.contexts.saving import load_context, save_context
from hetero_kv.contexts.tensor_digests import TensorDigests
from hetero_kv.contexts.writing import Tokens
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.recurrent_state import parted
from hetero_kv.engine.reservations import NOTHING_RESERVED, PLANNING, reserved_by_others
from hetero_kv.engine.resident_prefix import NO_RESIDENT_PREFIX, ResidentPrefix
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError, OutOfMemoryError
from hetero_kv.gpu_ops.attention_backend import AttentionBackend
from hetero_kv.models import ProgressReport
from hetero_kv.planning.attention_place import AttentionPlace
from hetero_kv.planning.common_plan import CommonPlan
from hetero_kv.planning.oom_error import ran_out_of_memory
from hetero_kv.planning.plan import Footprint, Plan, resolve_max_seq_len
from hetero_kv.rules.belonging import require_own, stray_cache
from hetero_kv.rules.matching import InjectionError
from hetero_kv.rules.preparing import Preparation
from hetero_kv.rules.rule_set import Rule
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import Settings


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
    """The changes that `inject` made to a model.

    Attributes:
        engine: the engine's settings in force.
        operators: module path -> operator, in the model's order.
        rules: module path -> the rule that injected its operator.
        weights: module path -> its setting `weights`, where a rule is about a module's weights.
        sources: module path -> the source of each of its operator's settings; "" -> the engine's.
        configs: the modules whose config a copy replaces, each with the original.
        guards: the forwards that wrap those of models.
        attention: the backend setting for attention on a GPU, and which backends have run.
        place: where tokens attend to the Context under `attend_on: auto`, and what of it under `split`.
        captures: whether decoding uses CUDA graphs, and which steps were captured.
        digests: digests of the model's weights, computed on first use; models that share weights share these too.
        sparse_drafts: whether an engine or conversation guesses this model's tokens by attention to few blocks, so that
            caches are planned with the blocks' mean keys.
        one_at_a_time: the lock that a thread takes during a forward, because operators are shared.
    """

    model: PreTrainedModel
    engine: EngineSettings
    operators: dict[str, Operator] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    sources: dict[str, dict[str, str]] = field(default_factory=dict)
    configs: list[tuple[Any, Any]] = field(default_factory=list)
    guards: list[PutForward] = field(default_factory=list)
    attention: AttentionBackend = field(default_factory=AttentionBackend)
    place: AttentionPlace = field(default_factory=AttentionPlace)
    captures: CaptureState = field(default_factory=CaptureState)
    digests: TensorDigests = field(default_factory=TensorDigests)
    sparse_drafts: bool = False
    one_at_a_time: Any = field(default_factory=threading.RLock, repr=False, compare=False)
    # The PEFT layers at the last call of `state`.
    _adapted: list[nn.Module] = field(default_factory=list, init=False, repr=False, compare=False)
    # Within `checked_once`: the state, once it is known.
    _checked: list[PresentState] | None = field(default=None, init=False, repr=False, compare=False)

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
        """The operators that compute attention, in the model's order; `attend_on: auto` is decided, if it can be."""
        return iter(self.placed())

    def placed(self, sequences: int = 1, max_seq_len: int | None = None) -> list[AttentionOperator]:
        """The same, by what `sequences` of `max_seq_len` tokens take together; None for the setting `max_seq_len`."""
        length = self.engine.max_seq_len if max_seq_len is None else max_seq_len
        operators = [each for each in self.operators.values() if isinstance(each, AttentionOperator)]
        decision = self.place.decide(self, operators, sequences, length)
        if decision is not None and decision.place != self.engine.attend_on:
            self.engine = replace(self.engine, attend_on=decision.place)
        return operators

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
        self.attention_operators()
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
            planned, budget = plan.resident_dram(capacity), self.engine.dram_budget
            return Store(capacity, forks, planned, is_auto=length == "auto", budget=budget)

    def common_store(
        self, max_seq_len: int | None = None, sequences: int = 1, tokens: int | None = None, *, share: float = 1.0
    ) -> Store:  # fmt: skip
        """A store that several caches share: `HeteroCache(model, store=store)`.

        Args:
            max_seq_len: capacity of each sequence, tokens; None takes the setting `max_seq_len`.
            sequences: the largest number of sequences at a time. The store has room for all of them at that length, if
                memory allows.
            tokens: capacity of all sequences together; None takes as many as `sequences` need and memory allows.
            share: the fraction of the free memory that the store may take; others take the rest.

        Raises OutOfMemoryError when one sequence of that length among `sequences`, or `tokens`, does not fit into the
        free memory.
        """
        length = self.engine.max_seq_len if max_seq_len is None else max_seq_len
        self.placed(sequences, max_seq_len)
        with PLANNING:
            gc.collect()
            plan = CommonPlan.of(self, sequences, reserved=reserved_by_others(None)).share(share)
            capacity = resolve_max_seq_len(length, plan)
            plan = replace(plan, longest=capacity)
            if tokens is None:
                # A sequence has whole blocks.
                layouts = (getattr(layer, "layout", None) for layer in self.cache_layers())
                size = max((layout.block_size for layout in layouts if layout is not None), default=1)
                tokens = max(capacity, min(plan.largest(), sequences * -(-capacity // size) * size))
            else:
                resolve_max_seq_len(tokens, plan, "kv_tokens")
            planned, budget = plan.resident_dram(tokens), self.engine.dram_budget
            return Store(capacity, planned=planned, tokens=tokens, maker=self, budget=budget)

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
        """The identity of a context saved now: model, weights, active modules and settings.

        Raises ContextError for hooks or tensors whose computation is unknown.
        """
        return Identity.of(self.model, self.attention_operators(), self.digests)

    def state(self) -> PresentState:
        """See CacheFactory."""
        checked = self._checked
        if checked:
            return checked[0]
        self._adapted = adapted_modules(self.model)
        found = PresentState(self.model)
        if checked is not None:
            checked.append(found)
        return found

    @contextmanager
    def checked_once(self) -> Iterator[None]:
        """Within this context all calls of `state` share one look at the model, which must not change meanwhile."""
        before, self._checked = self._checked, []
        try:
            yield
        finally:
            self._checked = before

    def adapters(self) -> tuple[frozenset[str], ...]:
        """See CacheFactory."""
        return effective_adapters(self._adapted)

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

    def trials_kept(self) -> AbstractContextManager[None]:
        """Within this context, what trials of fast paths show is kept; see `kept_trials`."""
        return trials_kept(self.model, self.operators, self.engine)

    def cache_layers(self) -> list[CacheLayerMixin]:
        """An empty cache layer per layer of the model: the operator's, or transformers' for a layer without one.

        Behind them are the states of layers that also have keys and values.
        """
        self.preparation.compile_for_first_cache()
        theirs = DynamicCache(config=attention_module.text_config(self.model)).layers
        layers, states = map(list, zip(*(parted(layer, index) for index, layer in enumerate(theirs)), strict=True))
        for operator in self.attention_operators():
            if operator.layer_idx >= len(layers):
                raise InjectionError(
                    f"the model's config has {len(layers)} layers (num_hidden_layers), and {operator.path} is layer "
                    f"{operator.layer_idx}: layers were removed after inject; call hetero_kv.eject(model) before that"
                )
            operator.shares_readings = self.sparse_drafts
            layers[operator.layer_idx] = operator.new_cache_layer()
        return [*layers, *(state for state in states if state is not None)]
