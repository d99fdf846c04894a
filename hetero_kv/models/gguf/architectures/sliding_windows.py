"""Reads which layers have a sliding window, and its size.

Defaults are llama.cpp's (`load_arch_hparams` in `src/models/`).
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.declaration import ConfigSettings, MetadataReader

PATTERN = "attention.sliding_window_pattern"
WINDOW = "attention.sliding_window"


def put_windows(
    metadata: MetadataReader,
    settings: ConfigSettings,
    usual: int,
    *,
    default: int | None = None,
    may_be_none: bool = False,
) -> None:
    """Put `sliding_window` and `layer_types`.

    Args:
        usual: the default pattern: of this many layers, all but the last have the window; 1 for no windows.
        default: the default window, tokens; None if the file must have it.
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
        else [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
    )
    # A list may include the blocks that predict further tokens.
    if len(has_window) not in (layers, metadata.scalar("block_count", layers)):
        raise metadata.unsupported(PATTERN, f"has not one value for each of {layers} layers")
    settings.put("sliding_window", window or None, WINDOW)
    kinds = ["sliding_attention" if each else "full_attention" for each in has_window[:layers]]
    settings.put("layer_types", kinds, PATTERN)
