"""Which layers attend to a window of the past only, as a file says it."""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.declaration import Said, Settings

PATTERN = "attention.sliding_window_pattern"
WINDOW = "attention.sliding_window"


def put_windows(said: Said, settings: Settings, usual: int) -> None:
    """Put `sliding_window` and `layer_types`.

    Args:
        usual: of so many layers all but the last have the window where the file does not say it; 1 for none.
    """
    layers = settings["num_hidden_layers"]
    window = said.one(WINDOW, None)
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
