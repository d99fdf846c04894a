"""What every operator is: a module that stands in the place of another and passes on what is not its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.adapter.cache_argument import given_cache
from hetero_kv.adapter.footprint import LayerFootprint
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.recording import RECORDING, NotCapturableError
from hetero_kv.adapter.token_arrays import TokenArrays
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.recorded_prompt import RecordedPrompt
from hetero_kv.engine.statistics import Statistic
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from hetero_kv.settings.description import describe
from hetero_kv.settings.engine_settings import EngineSettings


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
    #: `load_prefill`. An operator whose settings decide may make it an attribute of the instance.
    prefills_exactly: bool = False
    #: Whether a later prompt attends to all that is stored as well, up to the storage type's precision.
    continues_exactly: bool = False

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__()
        self.path = path
        self.wrapped = wrapped
        # A submodule is looked up in two places before it is found, and this one for every layer and token.
        self.__dict__["wrapped"] = wrapped
        self.settings = settings
        self.engine = engine
        self.training = wrapped.training
        self.register_load_state_dict_pre_hook(_with_wrapped)
        self.register_load_state_dict_post_hook(_without_wrapped)

    @classmethod
    def settings_class_for(cls, kwargs: Mapping[Any, Any]) -> type | None:
        """The dataclass of a rule's `kwargs`: `settings_class`, or the one that a key of them chooses."""
        return cls.settings_class

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

    @classmethod
    def is_wanted(cls, module: nn.Module, settings: Any) -> bool:
        """Whether the operator has anything to do in the place of `module` under these settings."""
        return True

    def install(self) -> None:
        """Change in the wrapped module what the operator needs changed, once it is sure to take its place."""

    def uninstall(self) -> nn.Module:
        """Take back what the operator changed in the wrapped module, and return that."""
        return self.wrapped

    def require_removable(self) -> None:
        """Raise HeteroKVError where `uninstall` would take away what somebody else has put on the wrapped module."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """See torch.nn.Module; the modules within the wrapped one have the names that they have in the untouched model,
        as in `state_dict`, which others look up by these (PEFT)."""
        memo = set() if memo is None else memo
        for name, module in ((prefix, self), (_joined(prefix, "wrapped"), self.wrapped)):
            if module not in memo:
                if remove_duplicate:
                    memo.add(module)
                yield name, module
        for name, child in self.wrapped.named_children():
            yield from child.named_modules(memo, _joined(prefix, name), remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The wrapped module's, for who makes names of them (accelerate); torch itself asks for `children`."""
        return self.wrapped.named_children()

    def children(self) -> Iterator[nn.Module]:
        """See torch.nn.Module."""
        return iter((self.wrapped,))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, under the names that it has in the untouched model."""
        return self.wrapped.state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # copy.deepcopy and pickle come here: forwards that were put around the model would be the first one's.
        raise HeteroKVError(
            f"a model with operators in it ({self.path}: {type(self).__name__}) cannot be copied or pickled; call "
            "hetero_kv.eject(model) first, and inject the rules into the copy"
        )

    def compile_own_kernels(self) -> None:
        """Compile what its first tokens need, or load it from the disk, once the weights are there."""

    def settings_in_layer(self) -> dict[str, Any]:
        """The settings as they apply here, in the order of the fields: a budget per layer is this layer's number."""
        if self.settings is None:
            return {}
        return {row.name: getattr(self.settings, row.name) for row in describe(type(self.settings))}

    def be_in_place(self) -> None:
        """From now on, what somebody puts in the place of an attribute of the wrapped module is the wrapped module's:
        an adapter around a projection, say."""
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
                f"{self.path}.{name} is a {type(value).__name__}, which cannot replace what is there ({error}); assign "
                "a torch.nn.Parameter, or call hetero_kv.eject(model) before torch.func.functional_call"
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
    """Before a state dict is loaded: the names that parameters have in the model with its operators."""
    for name in list(state):
        rest = name.removeprefix(prefix)
        if name.startswith(prefix) and not rest.startswith(_WRAPPED):
            state[f"{prefix}{_WRAPPED}{rest}"] = state.pop(name)


def _without_wrapped(operator: nn.Module, incompatible: Any) -> None:
    """Behind it: names that were missing or unexpected, as they are in the untouched model."""
    for names in incompatible:
        names[:] = [name.replace(f".{_WRAPPED}", ".") for name in names]


class AttentionOperator(Operator):
    """An operator in the place of an attention module: it computes the attention and owns the layer's cache.

    The wrapped module still makes queries, keys and values and projects the output; between the two it calls the
    attention function `hetero_kv`, which comes to `attend`.

    A family is a subclass of this and the cache layer that it makes. What the planner, `rules`, reports, JSON and the
    documentation show of it is what the methods under "what others ask" answer; whoever asks knows no family.
    """

    #: What its cache layers count (`FamilyLayer.statistics`).
    statistics: ClassVar[tuple[Statistic, ...]] = ()
    #: Whether `arguments_for` is asked, for every layer of every token. An operator may make it its own attribute.
    changes_arguments: bool = False
    #: Whether that looks at the hidden states, and at what the decoder layer was given (`layer_input`).
    reads_hidden_states: bool = False
    #: [rows, 1, width], what its decoder layer was given of a decoded token, before any norm; None: not known.
    layer_input: torch.Tensor | None = None
    #: What of the decoder layer normalises that for the attention module; None where nothing is known to.
    input_norm: nn.Module | None = None

    def __init__(self, path: str, wrapped: Any, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.layer_idx: int = wrapped.layer_idx
        self._own_config = wrapped.config

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        bridge.require_attention_interface(path, module)

    def install(self) -> None:
        self.wrapped.config = bridge.with_implementation(self._own_config)

    def uninstall(self) -> nn.Module:
        self.wrapped.config = self._own_config
        return self.wrapped

    def stored_by(self) -> dict[str, Any]:
        """What decides, beside the model, what its cache layer holds of tokens: a saved context goes on where this is
        the same. All settings, where an operator does not say which of them only choose what is read."""
        return self.settings_in_layer()

    @abstractmethod
    def new_cache_layer(self) -> FamilyLayer:
        """An empty cache layer."""

    def load_prefill(self, layer: Any, step: Step, recorded: RecordedPrompt) -> None:
        """Bring an empty cache layer into the state that prefilling the recorded prompt, whose step this is, leaves.

        Raises HeteroKVError where the operator's prefill is not full attention (`prefills_exactly`), or `recorded`
        lacks what it needs.
        """
        raise HeteroKVError(
            f"{self.path} ({type(self).__name__}) does not load a recorded prefill; prefill the prompt under its "
            "own rules: model(input_ids, past_key_values=HeteroCache(model))"
        )

    @abstractmethod
    def prefill_chunk(self, layer: Any, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """Exact attention of a chunk of the prompt: [batch, heads, tokens, v_dim]."""

    @abstractmethod
    def decode_step(self, layer: Any, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """Attention of one new token per row: [batch, heads, 1, v_dim]."""

    def arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the wrapped module's forward; an operator may note some and exchange others."""
        return kwargs

    def lasting_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What `arguments_for` gives back, without noting anything: the same tensors, or ones with the same numbers,
        for every decoded token, whatever the cache.

        Raises NotCapturableError where they differ from token to token.
        """
        raise NotCapturableError(f"{type(self).__name__} computes from what its attention module is given")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, its attention computed by this operator over a HeteroCache."""
        if self.changes_arguments:
            recording = RECORDING.get()
            if recording is None:
                kwargs = self.arguments_for(args, kwargs)
            else:
                kwargs = recording.noted_arguments(self, args, kwargs)
        cache = given_cache(kwargs)
        if type(cache) is not HeteroCache:
            cache = bridge.cache_in(args, kwargs, self.path)
        service = bridge.Service(self, cache)
        token = bridge.SERVING.set(service)
        try:
            output = self.wrapped(*args, **kwargs)
        finally:
            bridge.SERVING.reset(token)
        if service.calls != 1:
            raise UnsupportedModelError(
                f"{self.path} ({type(self.wrapped).__name__}) called its attention function {service.calls} times in "
                "one forward, not once; leave it out with `class: default`"
            )
        return output

    def attend(self, cache: HeteroCache, call: bridge.AttentionCall) -> torch.Tensor:
        """The attention of a call: [batch, heads, tokens, v_dim]. Rows of several lengths come as several steps."""
        steps = cache.steps
        if len(steps) > 1:
            parts = ((step, call.of_rows(step.rows)) for step in steps)
            return torch.cat([self.decode_step(step.cohort.layers[self.layer_idx], step, part) for step, part in parts])
        step = steps[0]
        layer = step.cohort.layers[self.layer_idx]
        if step.is_decode:
            return self.decode_step(layer, step, call)
        if layer.is_prefilling:
            return self.prefill_chunk(layer, step, call)
        with self.prefill(step):
            return self.prefill_chunk(layer, step, call)

    def prepare_arrays(self, cache: HeteroCache, dtype: Any, softcap: float | None) -> Any:
        """What `attend_arrays` needs of the present token, where it can take it; None where `attend` is to be asked.

        Args:
            dtype: what the arrays hold (`kernel_arrays.ARRAY_DTYPES`).
        """
        return None

    def attend_arrays(self, prepared: Any, arrays: TokenArrays, scale: float, softcap: float) -> None:
        """`decode_step` from `arrays.q`, `k` and `v` to `arrays.attended`, without tensors on the way."""
        raise NotImplementedError("an operator that prepares arrays attends to them")

    @contextmanager
    def prefill(self, step: Step) -> Iterator[None]:
        """Within this context a prompt passes through the layer in chunks; when it ends well it is stored."""
        layer = step.cohort.layers[self.layer_idx]
        layer.begin_prefill(step)
        try:
            yield
            self.end_prefill(layer, step)
        finally:
            layer.leave_prefill()

    def end_prefill(self, layer: Any, step: Step) -> None:
        """A prompt, or a part of one, has passed through the layer."""
        layer.end_prefill(step)

    # -- what others ask

    def footprint(self, shape: KVShape) -> LayerFootprint:
        """What this layer takes in memory, keys and values of `shape`; all of them where the model computes."""
        return LayerFootprint(shape)

    def attended_tokens(self, length: int) -> float:
        """Tokens that a decode step attends to behind a prompt of `length` tokens; at most, where each step decides."""
        return length

    @property
    def observed_queries(self) -> int:
        """Last queries of a recorded prompt that `load_prefill` reads."""
        return 0

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile what decoding needs, before the first token waits for it.

        Args:
            group: query heads per kv head.
            k_dim, v_dim: dimensions of a key and of a value.
            softcap: of the scores; 0 for none.
        """

    @classmethod
    def configure_together(cls, operators: Sequence[AttentionOperator]) -> None:
        """What is to be done once all operators of a model, `operators`, are in it; asked of each of their classes.

        Raises HeteroKVError for operators that cannot work together; none is put in then.
        """
