"""Reads which layers have a sliding window, its size, and how they rotate.

Defaults are llama.cpp's (`load_arch_hparams` in `src/models/`).
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.declaration import ConfigSettings, MetadataReader
from hetero_kv.models.gguf.architectures.rope import head_dim_of, partial_factor

PATTERN = "attention.sliding_window_pattern"
WINDOW = "attention.sliding_window"
ROTATED = "rope.dimension_count_swa"


def put_windows(
    metadata: MetadataReader,
    settings: ConfigSettings,
    usual: int,
    *,
    default: int | None = None,
    may_be_none: bool = False,
    full_first: bool = False,
) -> None:
    """Put `sliding_window` and `layer_types`.

    Args:
        usual: the default pattern: of this many layers, all but the last have the window; 1 for no windows.
        default: the default window, tokens; None if the file must have it.
        full_first: whether the layer without a window is the first of a pattern's, instead of the last.
        may_be_none: whether some models of the architecture have no windows; their files have 0 or no key.

    Raises ModelError if the file has no window, and the architecture requires one.
    """
    layers = settings["num_hidden_layers"]
    if may_be_none:
        window = metadata.scalar(WINDOW, default or 0)
    else:
        window = metadata.require(WINDOW, "sliding_window") if default is None else metadata.scalar(WINDOW, default)
        if not window:
            raise metadata.unsupported(WINDOW, "is no window, and the model has layers with a window")
    pattern = metadata.get(PATTERN, usual)
    if not window:
        pattern = 1
    has_window = (
        [bool(each) for each in pattern]
        if isinstance(pattern, tuple | list)
        else [pattern == 0 or layer % pattern != (0 if full_first else pattern - 1) for layer in range(layers)]
    )
    # A list may include the blocks that predict further tokens.
    if len(has_window) not in (layers, metadata.scalar("block_count", layers)):
        raise metadata.unsupported(PATTERN, f"has not one value for each of {layers} layers")
    settings.put("sliding_window", window or None, WINDOW)
    kinds = ["sliding_attention" if each else "full_attention" for each in has_window[:layers]]
    settings.put("layer_types", kinds, PATTERN)


def put_rope_by_window(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Divide `rope_parameters` by kind of layers: those with a window have a base of their own, and no scaling."""
    full, stated = settings["rope_parameters"], settings.from_file["rope_parameters"][1]
    base = float(metadata.scalar("rope.freq_base_swa", full["rope_theta"]))
    share = {name: full[name] for name in ("partial_rotary_factor",) if name in full}
    if share and metadata.has(ROTATED):
        rotated, dim = metadata.scalar(ROTATED), head_dim_of(settings)
        if rotated % 2 or not 0 < rotated <= dim:
            raise metadata.unsupported(ROTATED, f"is not an even number of the {dim} dimensions of a head")
        share["partial_rotary_factor"] = partial_factor(rotated, dim)
    settings.values["rope_parameters"] = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": base, **share},
    }
    settings.from_file["rope_parameters"] = (metadata.key("rope.*"), {"full_attention": stated})
