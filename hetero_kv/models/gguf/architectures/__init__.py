"""The tables of GGUF architectures: each maps metadata and tensors to a transformers model.

A file of an architecture without a table is refused. To support one, add an `Architecture` to the `TABLES` of a module
of this package.
"""

from __future__ import annotations

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures import (
    bitnet,
    deepseek,
    delta_net,
    dense,
    dots3_note,
    gemma,
    gemma3n,
    gemma4,
    granite_hybrid,
    granite_swa,
    hrm_text,
    hybrid,
    hyper_connections,
    kimi_linear,
    llama,
    llama4,
    minicpm3,
    minimax_m3,
    mixtures,
    older,
    older_mixtures,
    qwen,
    qwen4_exp,
    state_space,
    ungated,
    windowed_mixtures,
)
from hetero_kv.models.gguf.architectures.declaration import Architecture
from hetero_kv.models.gguf.architectures.unsupported import reason
from hetero_kv.models.gguf.file import GGUFFile

MODEL = "model"
#: `general.type` of files that belong to a model -> what they are.
ADDITIONS = {
    "mmproj": "the encoder of images or sounds beside a model",
    "adapter": "an adapter of a model's weights",
    "imatrix": "what a model's quantization is weighted by",
}
ARCHITECTURES: dict[str, Architecture] = {
    table.name: table
    for module in (
        llama,
        qwen,
        delta_net,
        gemma,
        dense,
        older,
        hybrid,
        mixtures,
        deepseek,
        gemma3n,
        gemma4,
        granite_hybrid,
        granite_swa,
        state_space,
        kimi_linear,
        llama4,
        minicpm3,
        older_mixtures,
        ungated,
        bitnet,
        windowed_mixtures,
        hyper_connections,
        minimax_m3,
        dots3_note,
        hrm_text,
        qwen4_exp,
    )
    for table in module.TABLES
}


def architecture_of(file: GGUFFile) -> Architecture:
    """The table of the file's architecture. Raises ModelError if there is none, or the file is not of a model."""
    kind = file.get("general.type", MODEL)
    if kind != MODEL:
        what = f" ({ADDITIONS[kind]})" if kind in ADDITIONS else ""
        raise ModelError(f"{str(file.path)!r} has general.type {kind!r}{what}; give the file of the model itself")
    table = ARCHITECTURES.get(file.architecture)
    if table is None:
        raise ModelError(
            f"{str(file.path)!r} has the GGUF architecture {file.architecture!r}, {reason(file.architecture)}"
        )
    return table
