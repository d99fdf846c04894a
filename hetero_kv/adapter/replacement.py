"""The base class of operators: modules that replace a module of the model and delegate the rest to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from hetero_kv.errors import HeteroKVError
from hetero_kv.settings.description import describe
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.former_names import refuse_former_methods

_WRAPPED = "wrapped."


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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_former_methods(cls, {"is_wanted": "applies"})

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
        """Whether the operator would change anything for `module` under these settings."""
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
        """From now on, assignments to attributes of the wrapped module go to the wrapped module.

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
            # This is how torch.func.functional_call replaces parameters by tensors.
            raise HeteroKVError(
                f"{self.path}.{name} is a {type(value).__name__}, which cannot replace the present value ({error}); "
                "assign a torch.nn.Parameter, or call hetero_kv.eject(model) before torch.func.functional_call"
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)


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
