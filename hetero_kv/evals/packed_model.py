"""A model whose weights stay as its files store them, for all methods of an evaluation alike."""

from __future__ import annotations

from hetero_kv.models import LoadedModel, OpenedModel
from hetero_kv.rules.injection import eject, eject_around_packed_weights, inject


def load_packed(opened: OpenedModel) -> LoadedModel:
    """Load a model's weights, those of a GGUF file as it stores them, and leave them so beneath every method's rules.

    A recipe run by itself has them so too; what decodes under it and what is measured here are the same numbers.

    Raises:
        ModelError: the files do not hold this model's weights.
    """
    injection = inject(opened.model, "dense")
    try:
        loaded = opened.load()
        injection.compile_kernels()
    except BaseException:
        eject(opened.model)
        raise
    eject_around_packed_weights(opened.model)
    return loaded
