"""A model in Hugging Face format is written as a GGUF file, by its architecture's published layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from tests.support.gguf_models.layouts import LAYOUTS, Layout, Place, Value

#: The name of an untied output matrix; a tied one is not written again.
HEAD = "lm_head.weight"
#: The ends of the keys of arrays whose whole numbers have 64 bits.
OF_64_BITS = (".ple.layer_multipliers", ".ple.head_offsets", ".ple.head_vocab_sizes")


def layout_of(config: Any) -> Layout:
    """The layout of a configuration's model type, or that which it names."""
    return LAYOUTS[getattr(config, "layout", config.model_type)]


def metadata(config: Any) -> dict[str, Any]:
    """What the file says of the model, by whole key, without the vocabulary."""
    layout = layout_of(config)
    found = {f"{layout.architecture}.{key}": _value(value, config) for key, value in layout.keys.items()}
    return {key: value for key, value in found.items() if value is not None}


def tensors(model: Any) -> dict[str, np.ndarray]:
    """The file's tensors by name, float32, or int32 where they are whole numbers, torch's order of dimensions.

    Raises KeyError for a parameter or buffer that the layout has no place for.
    """
    config, layout = model.config, layout_of(model.config)
    found = dict(layout.extra(config))
    stacks = (layout.blocks, *layout.further_blocks)
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in model.state_dict().items():
        if name == HEAD and config.tie_word_embeddings:
            continue
        match = re.fullmatch(rf"({'|'.join(map(re.escape, stacks))})\.(\d+)\.(.+)", name)
        block = int(match[2]) + stacks.index(match[1]) * getattr(config, "num_layers_per_stack", 0) if match else 0
        places, prefix, inner = (layout.layer, f"blk.{block}.", match[3]) if match else (layout.model, "", name)
        if inner in layout.scalars:
            continue
        within = re.sub(r"\.\d+(?=\.)", ".*", inner)
        place, ending = _place(places, within)
        array = (tensor.detach().float() if tensor.is_floating_point() else tensor.int()).numpy()
        if "*" in within:
            experts.setdefault(f"{prefix}{place}{ending}", []).append(array)
            continue
        named, change = place if isinstance(place, tuple) else (place, lambda array, config: array)
        changed = change(array, config.per_layer_config[block] if match else config)
        for suffix, part in (changed if isinstance(changed, dict) else {f"{named}{ending}": changed}).items():
            # A name behind "/" is of the model.
            found[suffix[1:] if suffix.startswith("/") else f"{prefix}{suffix}"] = np.ascontiguousarray(part)
    return found | {name: np.stack(parts) for name, parts in experts.items()}


def scalars(model: Any) -> dict[str, list[float]]:
    """The arrays of the file's metadata that have a parameter's number for each layer, by whole key."""
    layout, state = layout_of(model.config), model.state_dict()
    return {
        key: [float(state[f"{layout.blocks}.{layer}.{leaf}"]) for layer in range(model.config.num_hidden_layers)]
        for leaf, key in layout.scalars.items()
    }


def write(
    path: Path, model: Any, vocabulary: dict[str, Any], kind: GGMLQuantizationType | None = None, **changed: Any
) -> Path:
    """Write `model` as the GGUF file `path`.

    Args:
        vocabulary: metadata of the tokenizer, by whole key.
        kind: what matrices are quantized to; None for float32.
        changed: metadata to add or change, by key behind the architecture's name, with "__" for "."; None removes it.
    """
    architecture = layout_of(model.config).architecture
    writer = gguf.GGUFWriter(path, architecture)
    more = {f"{architecture}.{key.replace('__', '.')}": value for key, value in changed.items()}
    for key, value in {**metadata(model.config), **scalars(model), **vocabulary, **more}.items():
        if value is not None:
            add(writer, key, value)
    for name, tensor in tensors(model).items():
        if kind is None or not quantized(name, tensor):
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(name: str, tensor: np.ndarray) -> bool:
    """Whether a quantized file has this tensor in blocks: matrices are, but not those of routers and convolutions."""
    apart = ("ffn_gate_inp", "conv", "ssm_x", "ssm_dt", "ssm_a", "_norm", "rope_", "position_embd")
    return tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and not any(part in name for part in apart)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value in the type that files have: whole numbers are of 32 bits without a sign, others of 32 bits."""
    if isinstance(value, list | tuple):
        if value:
            kind = GGUFValueType.UINT64 if key.endswith(OF_64_BITS) else None
            writer.add_key_value(key, value, GGUFValueType.ARRAY, kind)
        return
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    writer.add_key_value(key, value, kinds.get(type(value), GGUFValueType.STRING))


def _value(value: Value, config: Any) -> Any:
    return value(config) if callable(value) else getattr(config, value)


def _place(places: Any, name: str) -> tuple[Place, str]:
    if name in places:
        return places[name], ""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        raise KeyError(name)
    return places[stem], f".{kind}"
