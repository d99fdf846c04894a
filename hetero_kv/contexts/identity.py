"""What a saved context belongs to: the model, and the settings that decide what is stored of a token."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.errors import shown

#: What is in a file, and how: raised with every change after which older files mean something else.
FORMAT = 2
# Numbers of each tensor that a model is known by.
_SAMPLES = 512
# Of a config, what says nothing of the numbers that the model computes.
_IDLE = {
    "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config",
}  # fmt: skip
_WRAPPED = "wrapped."


def version() -> str:
    """Of this package."""
    return metadata.version("hetero-kv")


@dataclasses.dataclass(frozen=True)
class Identity:
    """What must be the same where a context is loaded.

    Attributes:
        model: how people know it: type and sizes.
        config: fingerprint of the model's config.
        weights: fingerprint of its weights, as they are kept: quantised ones are others than unpacked ones.
        dtype: of the model.
        layers: by layer with an operator, its class and its settings that decide what is stored.
    """

    model: str
    config: str
    weights: str
    dtype: str
    layers: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, model: Any, operators: Iterable[AttentionOperator]) -> Identity:
        """Of a model with rules in it."""
        config = bridge.text_config(model)
        sizes = f"{config.num_hidden_layers} layers of {config.hidden_size}"
        return cls(
            f"{config.model_type}, {sizes}",
            _fingerprint(_plain({key: value for key, value in config.to_dict().items() if key not in _IDLE})),
            _weights(model),
            str(model.dtype).removeprefix("torch."),
            {str(each.layer_idx): _operator(each) for each in operators},
        )

    @classmethod
    def read(cls, said: object, where: str) -> Identity:
        """From a file. Raises DamagedContextError where it is none."""
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(said, dict):
            raise DamagedContextError(f"{where} does not say what it belongs to")
        is_sound = (
            sorted(said) == sorted(names)
            and all(isinstance(said[name], str) for name in names[:-1])
            and isinstance(said["layers"], dict)
            and all(isinstance(layer, dict) for layer in said["layers"].values())
        )
        if not is_sound:
            raise DamagedContextError(f"{where} does not say what it belongs to")
        return cls(**said)

    @property
    def digest(self) -> str:
        """One text for all of it."""
        return _fingerprint(dataclasses.asdict(self))

    def require(self, here: Identity, where: str, *, weights: bool = True) -> None:
        """Raise ContextError, naming what differs and what would fit, unless `here` is the same.

        weights: whether the model has its weights already, so that they are compared too.
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
        if weights and self.weights != here.weights:
            raise ContextError(
                f"{where} was saved with other weights of {self.model} (fingerprint {self.weights[:12]}, here "
                f"{here.weights[:12]}): load the file that it was saved with, packed as it was (weights, gguf_path)"
            )
        if self.layers != here.layers:
            raise ContextError(f"{where} was saved under other settings: {_difference(self.layers, here.layers)}")


def _difference(saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]]) -> str:
    differing = [index for index in dict.fromkeys([*saved, *here]) if saved.get(index) != here.get(index)]
    first = differing[0]
    was, now = saved.get(first, {}), here.get(first, {})
    names = [name for name in dict.fromkeys([*was, *now]) if was.get(name) != now.get(name)]
    said = ", ".join(f"{name} {shown(was.get(name), 60)} (here {shown(now.get(name), 60)})" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    layers = f"layer {first}" if len(differing) == 1 else f"{len(differing)} layers, as in layer {first}"
    return f"in {layers}, {said}{more}; put in rules with those settings"


def _operator(operator: AttentionOperator) -> dict[str, Any]:
    # As a file says it: lists for tuples.
    return json.loads(json.dumps({"operator": type(operator).__name__, **_plain(operator.stored_by())}))


def _plain(value: Any) -> Any:
    """`value` as JSON has it, objects as their fields, keys in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str) if not str(key).startswith("_")}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _fingerprint(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _weights(model: nn.Module) -> str:
    """From the names and shapes of all weights and from numbers of each, at equal steps: quick, whatever their size."""
    seen = hashlib.sha256()
    # Of the buffers the packed weights: others, as the frequencies of a rotation, may change from prompt to prompt.
    packed = ((name, buffer) for name, buffer in model.named_buffers() if buffer.dtype == torch.uint8)
    tensors = [*model.named_parameters(), *packed]
    for name, tensor in sorted(tensors, key=lambda named: named[0].replace(_WRAPPED, "")):
        seen.update(f"{name.replace(_WRAPPED, '')} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().flatten()
            step = max(1, len(flat) // _SAMPLES)
            seen.update(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
