"""The base classes of operators: modules that replace a module of the model and delegate the rest to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge
from hetero_kv.adapter.cache_argument import passed_cache
from hetero_kv.adapter.decode_buffers import DecodeBuffers
from hetero_kv.adapter.footprint import LayerFootprint
from hetero_kv.adapter.graph_recording import RECORDING, NotCapturableError
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.recorded_prompt import RecordedPrompt
from hetero_kv.engine.statistics import Statistic
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from hetero_kv.settings.description import describe
from hetero_kv.settings.engine_settings import EngineSettings


class Operator(nn.Module):
    """A module that a rule puts in the place of `wrapped`; missing attributes are looked up in `wrapped`.

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
    #: Whether its prefill equals that of the untouched model, up to rounding; an attention operator then has
    #: `load_prefill`. If this depends on the settings, it may be an instance attribute.
    prefills_exactly: bool = False
    #: Whether later prompts also attend to all stored tokens, up to the storage type's precision.
    continues_exactly: bool = False

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__()
        self.path = path
        self.wrapped = wrapped
        # Found in __dict__ at once: every layer and token reads it, and a submodule lookup takes two steps more.
        self.__dict__["wrapped"] = wrapped
        self.settings = settings
        self.engine = engine
        self.training = wrapped.training
        self.register_load_state_dict_pre_hook(_with_wrapped)
        self.register_load_state_dict_post_hook(_without_wrapped)

    @classmethod
    def settings_class_for(cls, kwargs: Mapping[Any, Any]) -> type | None:
        """The dataclass of a rule's `kwargs`: `settings_class`, or the one that a key of `kwargs` chooses."""
        return cls.settings_class

    @classmethod
    def registries(cls) -> Mapping[str, Mapping[str, str]]:
        """The registered pieces that the settings can name, by kind: name -> meaning.

        A kind's title includes the setting that names it: "Eviction policies of BoundedAttention (policy)".
        """
        return {}

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """The operator for `module` under a rule with this class: this class, or a variant for the module's kind."""
        return cls

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        """Raise UnsupportedModelError, naming `path` and the reason, unless the operator can replace `module`."""

    @classmethod
    def applies(cls, module: nn.Module, settings: Any) -> bool:
        """Whether the operator changes anything in the place of `module` under these settings."""
        return True

    def install(self) -> None:
        """Prepare the wrapped module, once the operator is certain to replace it."""

    def uninstall(self) -> nn.Module:
        """Undo `install` and return the wrapped module."""
        return self.wrapped

    def require_removable(self) -> None:
        """Raise HeteroKVError when `uninstall` would remove what others have put on the wrapped module."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """See torch.nn.Module. Modules within the wrapped one keep their names in the untouched model.

        The names match `state_dict`, which other libraries rely on (PEFT).
        """
        memo = set() if memo is None else memo
        for name, module in ((prefix, self), (_joined(prefix, "wrapped"), self.wrapped)):
            if module not in memo:
                if remove_duplicate:
                    memo.add(module)
                yield name, module
        for name, child in self.wrapped.named_children():
            yield from child.named_modules(memo, _joined(prefix, name), remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The wrapped module's children, for libraries that build names of them (accelerate); torch uses `children`."""
        return self.wrapped.named_children()

    def children(self) -> Iterator[nn.Module]:
        """See torch.nn.Module."""
        return iter((self.wrapped,))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state dict, under the names of the untouched model."""
        return self.wrapped.state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Called by copy.deepcopy and pickle, which would copy forwards that still refer to the original model.
        raise HeteroKVError(
            f"a model with operators ({self.path}: {type(self).__name__}) cannot be copied or pickled; call "
            "hetero_kv.eject(model) first, and inject the rules into the copy"
        )

    def compile_own_kernels(self) -> None:
        """Compile the kernels of the first tokens, or load them from disk; called once the weights are loaded."""

    def settings_in_layer(self) -> dict[str, Any]:
        """The settings of this layer, in the order of the fields; of a budget per layer, this layer's number."""
        if self.settings is None:
            return {}
        return {row.name: getattr(self.settings, row.name) for row in describe(type(self.settings))}

    def be_in_place(self) -> None:
        """From now on, assigning an attribute that the wrapped module has assigns it there.

        An adapter that replaces a projection is an example.
        """
        self.__dict__["_is_in_place"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        values = self.__dict__
        is_theirs = "_is_in_place" in values and not name.startswith("_")
        if is_theirs and not any(name in own for own in (values, self._modules, self._buffers)):
            wrapped = values["wrapped"]
            if not hasattr(type(self), name) and hasattr(wrapped, name):
                self._set_wrapped(wrapped, name, value)
                return
        super().__setattr__(name, value)

    def _set_wrapped(self, wrapped: nn.Module, name: str, value: Any) -> None:
        try:
            setattr(wrapped, name, value)
        except TypeError as error:
            # torch.func.functional_call exchanges parameters so, for tensors.
            raise HeteroKVError(
                f"{self.path}.{name} is a {type(value).__name__}, which cannot replace the present value ({error}); "
                "assign a torch.nn.Parameter, or call hetero_kv.eject(model) before torch.func.functional_call"
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)


_WRAPPED = "wrapped."


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _with_wrapped(operator: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: rename parameters to their names in the model with operators."""
    for name in list(state):
        rest = name.removeprefix(prefix)
        if name.startswith(prefix) and not rest.startswith(_WRAPPED):
            state[f"{prefix}{_WRAPPED}{rest}"] = state.pop(name)


def _without_wrapped(operator: nn.Module, incompatible: Any) -> None:
    """After it is loaded: rename missing or unexpected parameters to their names in the untouched model."""
    for names in incompatible:
        names[:] = [name.replace(f".{_WRAPPED}", ".") for name in names]


class AttentionOperator(Operator):
    """An operator in the place of an attention module: it computes the attention and owns the layer's cache.

    The wrapped module still computes queries, keys and values, and projects the output. In between it calls the
    attention function `hetero_kv`, which calls `attend`.

    A family is a subclass of this class with its cache layer. The planner, `rules`, reports, JSON and the documentation
    know no family: they use only the methods below "used by the planner and reports".
    """

    #: Statistics of its cache layers (`FamilyLayer.statistics`).
    statistics: ClassVar[tuple[Statistic, ...]] = ()
    #: Whether `arguments_for` is called, for every layer and token. May be an instance attribute.
    changes_arguments: bool = False
    #: Whether `arguments_for` reads the hidden states, and the decoder layer's input (`layer_input`).
    reads_hidden_states: bool = False
    #: The decoder layer's input of a decoded token, before any norm, [rows, 1, width]; None: unknown.
    layer_input: torch.Tensor | None = None
    #: The decoder layer's norm before the attention module; None where unknown.
    input_norm: nn.Module | None = None

    def __init__(self, path: str, wrapped: Any, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.layer_idx: int = wrapped.layer_idx
        self._own_config = wrapped.config

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        attention_module.require_attention_interface(path, module)

    def install(self) -> None:
        self.wrapped.config = bridge.with_implementation(self._own_config)

    def uninstall(self) -> nn.Module:
        self.wrapped.config = self._own_config
        return self.wrapped

    def stored_by(self) -> dict[str, Any]:
        """The settings that, together with the model, determine the contents of its cache layer.

        A saved context can be continued where these are equal. By default all settings; an operator may leave out those
        that only choose what is read.
        """
        return self.settings_in_layer()

    @abstractmethod
    def new_cache_layer(self) -> FamilyLayer:
        """An empty cache layer."""

    def load_prefill(self, layer: Any, step: Step, recorded: RecordedPrompt) -> None:
        """Bring an empty cache layer into the state after the prefill of the recorded prompt, whose step is `step`.

        Raises HeteroKVError when the operator's prefill is not full attention (`prefills_exactly`), or `recorded` is
        incomplete.
        """
        raise HeteroKVError(
            f"{self.path} ({type(self).__name__}) cannot load a recorded prefill; prefill the prompt under its own "
            "rules: model(input_ids, past_key_values=HeteroCache(model))"
        )

    @abstractmethod
    def prefill_chunk(self, layer: Any, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """Exact attention of a chunk of the prompt: [batch, heads, tokens, v_dim]."""

    @abstractmethod
    def decode_step(self, layer: Any, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """Attention of one new token per row: [batch, heads, 1, v_dim]."""

    def arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments for the wrapped module's forward; an operator may record or replace some."""
        return kwargs

    def lasting_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The result of `arguments_for` without its side effects, valid for every decoded token and cache.

        The tensors are the same, or have the same numbers. Raises NotCapturableError when they differ from token to
        token.
        """
        raise NotCapturableError(f"{type(self).__name__} computes from the arguments of its attention module")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, its attention computed by this operator over a HeteroCache."""
        if self.changes_arguments:
            recording = RECORDING.get()
            if recording is None:
                kwargs = self.arguments_for(args, kwargs)
            else:
                kwargs = recording.record_arguments(self, args, kwargs)
        cache = passed_cache(kwargs)
        if type(cache) is not HeteroCache:
            cache = bridge.cache_in(args, kwargs, self.path)
        service = bridge.ActiveHandler(self, cache)
        token = bridge.ACTIVE_HANDLER.set(service)
        try:
            output = self.wrapped(*args, **kwargs)
        finally:
            bridge.ACTIVE_HANDLER.reset(token)
        if service.calls != 1:
            raise UnsupportedModelError(
                f"{self.path} ({type(self.wrapped).__name__}) called its attention function {service.calls} times in "
                "one forward instead of once; exclude it with `class: default`"
            )
        return output

    def attend(self, cache: HeteroCache, call: bridge.AttentionCall) -> torch.Tensor:
        """The attention of a call: [batch, heads, tokens, v_dim]. Rows of several lengths are several steps."""
        steps = cache.steps
        if len(steps) > 1:
            parts = ((step, call.of_rows(step.rows)) for step in steps)
            return torch.cat([self.decode_step(step.group.layers[self.layer_idx], step, part) for step, part in parts])
        step = steps[0]
        layer = step.group.layers[self.layer_idx]
        if step.is_decode:
            return self.decode_step(layer, step, call)
        if layer.is_prefilling:
            return self.prefill_chunk(layer, step, call)
        with self.prefill(step):
            return self.prefill_chunk(layer, step, call)

    def prepare_arrays(self, cache: HeteroCache, dtype: Any, softcap: float | None) -> Any:
        """The data that `attend_arrays` needs for the present token; None where `attend` must compute it.

        Args:
            dtype: numpy type of the arrays (`kernel_arrays.ARRAY_DTYPES`).
        """
        return None

    def attend_arrays(self, prepared: Any, arrays: DecodeBuffers, scale: float, softcap: float) -> None:
        """`decode_step` from `arrays.q`, `k` and `v` to `arrays.attended`, without intermediate tensors."""
        raise NotImplementedError("an operator that prepares arrays attends to them")

    @contextmanager
    def prefill(self, step: Step) -> Iterator[None]:
        """Within this context a prompt passes through the layer in chunks; without an error it is stored at the end."""
        layer = step.group.layers[self.layer_idx]
        layer.begin_prefill(step)
        try:
            yield
            self.end_prefill(layer, step)
        finally:
            layer.leave_prefill()

    def end_prefill(self, layer: Any, step: Step) -> None:
        """Called after a prompt, or a part of one, has passed through the layer."""
        layer.end_prefill(step)

    # -- used by the planner and reports

    def footprint(self, shape: KVShape) -> LayerFootprint:
        """The layer's memory, for keys and values of `shape`; by default all of them on the compute device."""
        return LayerFootprint(shape)

    def attended_tokens(self, length: int) -> float:
        """Tokens that a decode step after `length` tokens attends to; the maximum where each step decides."""
        return length

    @property
    def observed_queries(self) -> int:
        """Number of last queries of a recorded prompt that `load_prefill` reads."""
        return 0

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile the kernels of decoding, before the first token needs them.

        Args:
            group: query heads per kv head.
            k_dim, v_dim: dimensions of a key and of a value.
            softcap: of the scores; 0 for none.
        """

    @classmethod
    def configure_together(cls, operators: Sequence[AttentionOperator]) -> None:
        """Configure all operators of a model together, once all are made; called for each of their classes.

        Raises HeteroKVError for operators that cannot work together; none is injected then.
        """
