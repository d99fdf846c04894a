"""What every operator is: a module that stands in the place of another and passes on what is not its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from hetero_kv.adapter import bridge
from hetero_kv.adapter.footprint import LayerFootprint
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.statistics import Statistic
from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.recorded_layer import RecordedLayer
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import describe

#: What the layers of one cache hand to each other, under keys of their family's own.
SharedByLayers = dict[Any, Any]


class Operator(nn.Module):
    """A module that a rule puts in the place of `wrapped`. Attributes it does not have are those of `wrapped`.

    Args:
        path: the replaced module's path in the model.
        wrapped: the replaced module.
        settings: an instance of `settings_class`, or None where that is None.
        engine: settings of the whole engine.
    """

    #: One line for `--help` and the documentation.
    meaning: ClassVar[str] = ""
    #: The dataclass of the operator's keyword arguments; None when it takes none.
    settings_class: ClassVar[type | None] = None
    #: The keyword argument by which `settings_class_for` chooses, if it does.
    chosen_by: ClassVar[str | None] = None
    #: Whether a prompt prefills under it as in the untouched model, up to rounding; an attention operator then has
    #: `take_over`. An operator whose settings decide may make it an attribute of the instance.
    prefills_exactly: bool = False
    #: Whether a later prompt attends to all that is stored as well, up to the storage type's precision.
    continues_exactly: bool = False

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__()
        self.path = path
        self.wrapped = wrapped
        self.settings = settings
        self.engine = engine
        self.training = wrapped.training

    @classmethod
    def settings_class_for(cls, kwargs: Mapping[Any, Any]) -> type | None:
        """The dataclass of a rule's `kwargs`: `settings_class`, or the one that a key of them chooses."""
        return cls.settings_class

    @classmethod
    def settings_classes(cls) -> Mapping[str, type]:
        """Every dataclass that `settings_class_for` may return, under what chooses it: "" or "policy: h2o"."""
        return {} if cls.settings_class is None else {"": cls.settings_class}

    @classmethod
    def registries(cls) -> Mapping[str, Mapping[str, str]]:
        """What the settings can name of registered pieces, by kind: name -> meaning.

        A kind is titled with the setting that names it: "Eviction policies of BoundedAttention (policy)".
        """
        return {}

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """The operator that a rule naming this one gives `module`: itself, or the one that the module's kind needs."""
        return cls

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        """Raise UnsupportedModelError, naming `path` and the reason, unless the operator can replace `module`."""

    def install(self) -> None:
        """Change in the wrapped module what the operator needs changed, once it is sure to take its place."""

    def uninstall(self) -> nn.Module:
        """Take back what the operator changed in the wrapped module, and return that."""
        return self.wrapped

    def settings_in_layer(self) -> dict[str, Any]:
        """The settings as they apply here, in the order of the fields: a budget per layer is this layer's number."""
        if self.settings is None:
            return {}
        return {row.name: getattr(self.settings, row.name) for row in describe(type(self.settings))}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)


class AttentionOperator(Operator):
    """An operator in the place of an attention module: it computes the attention and owns the layer's cache.

    The wrapped module still makes queries, keys and values and projects the output; between the two it calls the
    attention function `hetero_kv`, which comes to `attend`.

    A family is a subclass of this and the cache layer that it makes. What the planner, `rules`, reports, JSON and the
    documentation show of it is what the methods under "what others ask" answer; whoever asks knows no family.
    """

    #: What its cache layers count (`OperatorLayer.statistics`).
    statistics: ClassVar[tuple[Statistic, ...]] = ()
    #: Whether the whole model's forward is to be cut into parts that pass through all layers one after the other.
    passes_in_parts: ClassVar[bool] = False

    def __init__(self, path: str, wrapped: Any, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.layer_idx: int = wrapped.layer_idx
        self._own_config = wrapped.config

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        """See Operator."""
        bridge.require_attention_interface(path, module)

    def install(self) -> None:
        """See Operator."""
        self.wrapped.config = bridge.with_implementation(self._own_config)

    def uninstall(self) -> nn.Module:
        """See Operator."""
        self.wrapped.config = self._own_config
        return self.wrapped

    @abstractmethod
    def new_cache_layer(self, capacity: int, shared: SharedByLayers) -> CacheLayerMixin:
        """An empty cache layer for `capacity` tokens; `shared` is common to the layers of one cache."""

    def take_over(self, cache: HeteroCache, recorded: RecordedLayer) -> None:
        """Bring this layer of an empty cache into the state that prefilling the recorded prompt leaves.

        Raises HeteroKVError where the operator's prefill is not full attention (`prefills_exactly`), or `recorded`
        lacks what it needs.
        """
        raise HeteroKVError(
            f"{self.path} ({type(self).__name__}) does not take over a recorded prefill; prefill the prompt under its "
            "own rules: model(input_ids, past_key_values=HeteroCache(model))"
        )

    @abstractmethod
    def prefill_chunk(self, layer: Any, call: bridge.AttentionCall) -> torch.Tensor:
        """Exact attention of a chunk of the prompt: [batch, heads, tokens, v_dim]."""

    @abstractmethod
    def decode_step(self, layer: Any, call: bridge.AttentionCall) -> torch.Tensor:
        """Attention of one new token per row: [batch, heads, 1, v_dim]."""

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, its attention computed by this operator over a HeteroCache."""
        cache = bridge.cache_in(args, kwargs, self.path)
        layer = cache.layers[self.layer_idx]
        served = []

        def attend(call: bridge.AttentionCall) -> torch.Tensor:
            served.append(True)
            return self._attend(layer, call, is_prompt=call.q.shape[2] > 1 or cache.is_passing)

        with bridge.serving(attend):
            output = self.wrapped(*args, **kwargs)
        if len(served) != 1:
            raise bridge.UnsupportedModelError(
                f"{self.path} ({type(self.wrapped).__name__}) called its attention function {len(served)} times in one "
                "forward, not once; leave it out with `class: default`"
            )
        return output

    def _attend(self, layer: Any, call: bridge.AttentionCall, is_prompt: bool) -> torch.Tensor:
        if layer.is_prefilling:
            return self.prefill_chunk(layer, call)
        if is_prompt:
            with layer.prefill(call.q.shape[2]):
                return self.prefill_chunk(layer, call)
        layer.require_room(1)
        return self.decode_step(layer, call)

    # -- what others ask

    def footprint(self, shape: KVShape) -> LayerFootprint:
        """What this layer takes in memory, keys and values of `shape`; all of them where the model computes."""
        return LayerFootprint(shape)

    def attended_tokens(self, length: int) -> float:
        """Tokens that a decode step attends to behind a prompt of `length` tokens."""
        return length

    @property
    def observed_queries(self) -> int:
        """Last queries of a recorded prompt that `take_over` reads."""
        return 0

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile what decoding needs, before the first token waits for it.

        Args:
            group: query heads per kv head.
            k_dim, v_dim: dimensions of a key and of a value.
            softcap: of the scores; 0 for none.
        """

    @classmethod
    def settle(cls, operators: Sequence[AttentionOperator]) -> None:
        """What is to be done once all operators of a model, `operators`, are in it; asked of each of their classes.

        Raises HeteroKVError for operators that cannot work together; none is put in then.
        """
