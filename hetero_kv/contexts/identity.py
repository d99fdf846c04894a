"""The identity of a saved context: the model, and the settings that decide what is stored per token.

A renamed setting is recorded under its oldest name, so that older contexts and their addresses stay valid.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from torch import nn

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.replacement import Operator
from hetero_kv.contexts.active_state import active_parts, class_of, description_of
from hetero_kv.contexts.active_tensors import active_tensors
from hetero_kv.contexts.tensor_digests import TensorDigests
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.errors import shown
from hetero_kv.settings.description import oldest_names

#: The version of the file format: raised with every incompatible change.
FORMAT = 3
# Config keys that do not affect the model's computation.
_IDLE = {
    "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config",
}  # fmt: skip
# Characters shown of a foreign module's description.
_SHOWN = 400


def version() -> str:
    """The version of this package."""
    return metadata.version("hetero-kv")


@dataclasses.dataclass(frozen=True)
class Identity:
    """The model and settings that must be equal when a context is saved and loaded.

    Attributes:
        model: a readable name: type and sizes.
        config: fingerprint of the model's config.
        weights: fingerprint of all bytes of its weights in their present format, so that quantized and unpacked weights
            differ. Inactive adapters do not count.
        active: class name -> fingerprint of its modules' other state (`active_state`), with a description for classes
            that are neither torch's, transformers' nor this package's.
        dtype: the model's dtype.
        layers: layer index -> its operator's class and the settings that decide what is stored.
        renamed: layer index -> recorded name -> today's name, of its renamed settings; for messages, and not recorded.
    """

    model: str
    config: str
    weights: str
    dtype: str
    active: dict[str, str]
    layers: dict[str, dict[str, Any]]
    renamed: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, model: Any, operators: Iterable[AttentionOperator], digests: TensorDigests | None = None) -> Identity:
        """The identity of an injected model.

        Args:
            digests: caches digests of its weights; None to leave weights and active state out.

        Raises ContextError for hooks or tensors whose computation is unknown.
        """
        config = attention_module.text_config(model)
        sizes = f"{config.num_hidden_layers} layers of {config.hidden_size}"
        by_layer = {str(each.layer_idx): each for each in operators}
        oldest = {
            index: oldest_names(type(each.settings)) if each.settings is not None else {}
            for index, each in by_layer.items()
        }
        return cls(
            f"{config.model_type}, {sizes}",
            _fingerprint(_plain({key: value for key, value in config.to_dict().items() if key not in _IDLE})),
            "" if digests is None else _weights(model, digests),
            str(model.dtype).removeprefix("torch."),
            {} if digests is None else _active(model),
            {index: _operator(each, oldest[index]) for index, each in by_layer.items()},
            {index: {was: name for name, was in names.items()} for index, names in oldest.items()},
        )

    @classmethod
    def read(cls, metadata: object, where: str) -> Identity:
        """The identity in a file's metadata. Raises DamagedContextError if it is invalid."""
        names = [field.name for field in dataclasses.fields(cls) if field.compare]
        if not isinstance(metadata, dict):
            raise DamagedContextError(f"{where} does not name its model and settings")
        is_sound = (
            sorted(metadata) == sorted(names)
            and all(isinstance(metadata[name], str) for name in names[:-2])
            and isinstance(metadata["active"], dict)
            and all(isinstance(each, str) for each in metadata["active"].values())
            and isinstance(metadata["layers"], dict)
            and all(isinstance(layer, dict) for layer in metadata["layers"].values())
        )
        if not is_sound:
            raise DamagedContextError(f"{where} does not name its model and settings")
        return cls(**metadata)

    @property
    def recorded(self) -> dict[str, Any]:
        """The fields that a file records."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}

    @property
    def digest(self) -> str:
        """A fingerprint of what is recorded."""
        return _fingerprint(self.recorded)

    def require(self, here: Identity, where: str, *, weights: bool = True) -> None:
        """Raise ContextError, naming the difference and the remedy, unless `here` is equal.

        weights: whether to compare weights and active state, which requires that the model's weights are loaded.
        """
        for name, remedy in (
            ("model", "load that model"),
            ("config", "load the model with the configuration that it had"),
            ("dtype", f"load the model with dtype {self.dtype}"),
        ):
            if getattr(self, name) != getattr(here, name):
                raise ContextError(
                    f"{where} was saved with another {name}, {getattr(self, name)}; here it is {getattr(here, name)}: "
                    f"{remedy}"
                )
        if weights and self.active != here.active:
            raise ContextError(f"{where} was saved {_other_parts(self.active, here.active)}")
        if weights and self.weights != here.weights:
            raise ContextError(
                f"{where} was saved with other weights of {self.model} (fingerprint {self.weights[:12]}, here "
                f"{here.weights[:12]}): load the file that it was saved with, packed in the "
                "same way (weights, gguf_path), and change or merge no weights"
            )
        if self.layers != here.layers:
            differing = _difference(self.layers, here.layers, here.renamed)
            raise ContextError(f"{where} was saved under other settings: {differing}")


def _difference(
    saved: Mapping[str, Mapping[str, Any]],
    here: Mapping[str, Mapping[str, Any]],
    renamed: Mapping[str, Mapping[str, str]],
) -> str:
    differing = [index for index in dict.fromkeys([*saved, *here]) if saved.get(index) != here.get(index)]
    first = differing[0]
    was, now = saved.get(first, {}), here.get(first, {})
    names = [name for name in dict.fromkeys([*was, *now]) if was.get(name) != now.get(name)]
    today = renamed.get(first, {})
    differences = ", ".join(
        f"{today.get(name, name)} {shown(was.get(name), 60)} (here {shown(now.get(name), 60)})" for name in names[:4]
    )
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    layers = f"layer {first}" if len(differing) == 1 else f"{len(differing)} layers, as in layer {first}"
    return f"in {layers}, {differences}{more}; inject rules with those settings"


def _operator(operator: AttentionOperator, oldest: Mapping[str, str]) -> dict[str, Any]:
    stored = {oldest.get(name, name): value for name, value in operator.stored_by().items()}
    # A round trip through JSON, which turns tuples into lists as the file does.
    return json.loads(json.dumps({"operator": type(operator).__name__, **_plain(stored)}))


def _plain(value: Any) -> Any:
    """`value` as JSON data: objects become their fields, keys are sorted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str) if not str(key).startswith("_")}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _fingerprint(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _active(model: nn.Module) -> dict[str, str]:
    """Class name -> a fingerprint of its modules, with a description of the first if the class is foreign."""
    texts: dict[str, list[str]] = {}
    foreign: dict[str, str] = {}
    for part in active_parts(model):
        name, text = class_of(part), description_of(part)
        if isinstance(part.module, Operator):
            continue
        texts.setdefault(name, []).append(f"{part.path}: {text}")
        if not part.is_known:
            foreign.setdefault(name, f" {part.path}: {text}".replace("'", "").replace('"', "")[:_SHOWN])
    return {
        name: _fingerprint(descriptions)[:16] + foreign.get(name, "") for name, descriptions in sorted(texts.items())
    }


def _other_parts(saved: Mapping[str, str], here: Mapping[str, str]) -> str:
    differing = [name for name in dict.fromkeys([*saved, *here]) if saved.get(name) != here.get(name)]
    # Classes with a description come first, since the message can show what differs.
    name = max(differing, key=lambda name: len(saved.get(name, "") + here.get(name, "")))
    was, now = (shown(each[name], _SHOWN) if name in each else "none" for each in (saved, here))
    return (
        f"with other modules of class {name} in the model, {was}; here {now}: activate, scale and merge the same "
        "adapters, or prefill again"
    )


def _weights(model: nn.Module, digests: TensorDigests) -> str:
    """A fingerprint of the names, dtypes, shapes and bytes of the weights."""
    named = list(active_tensors(model))
    each = digests.of([tensor for _, tensor in named])
    lines = (
        f"{name} {tensor.dtype} {list(tensor.shape)} {digest.hex()}\n"
        for (name, tensor), digest in zip(named, each, strict=True)
    )
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
