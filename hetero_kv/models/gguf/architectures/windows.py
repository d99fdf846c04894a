"""Which layers attend to a window of the past only, as a file says it.

Defaults are llama.cpp's (`load_arch_hparams` in `src/models/`).
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.declaration import Said, Settings

PATTERN = "attention.sliding_window_pattern"
WINDOW = "attention.sliding_window"


def put_windows(
    said: Said, settings: Settings, usual: int, *, default: int | None = None, may_be_none: bool = False
) -> None:
    """Put `sliding_window` and `layer_types`.

    Args:
        usual: of so many layers all but the last have the window where the file does not say it; 1 for none.
        default: the window where the file does not say it; None where it must.
        may_be_none: whether there are models without windows, whose files say 0 or nothing.

    Raises ModelError where there is no window and the architecture has one.
    """
    layers = settings["num_hidden_layers"]
    if may_be_none:
        window = said.one(WINDOW, default or 0)
    else:
        window = said.require(WINDOW, "sliding_window") if default is None else said.one(WINDOW, default)
        if not window:
            raise said.refused(WINDOW, "is no window, and such a model has layers with one")
    pattern = said.get(PATTERN, usual)
    if not window:
        pattern = 1
    has_window = (
        [bool(each) for each in pattern]
        if isinstance(pattern, tuple | list)
        else [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
    )
    if len(has_window) != layers:
        raise said.refused(PATTERN, f"is not one for each of {layers} layers")
    settings.put("sliding_window", window or None, WINDOW)
    kinds = ["sliding_attention" if each else "full_attention" for each in has_window]
    settings.put("layer_types", kinds, PATTERN)
