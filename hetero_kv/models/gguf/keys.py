"""Keys of GGUF metadata that have no effect on what a model computes, and the refusal of those that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.declaration import Architecture, shown
from hetero_kv.models.gguf.file import GGUFFile

#: Keys, as regular expressions -> why they change nothing, or who else reads them.
WITHOUT_EFFECT = {
    r"general\.(architecture|alignment)": "read with the header",
    r"general\.(name|basename|finetune|author|version|organization|description|quantized_by|size_label|tags|languages"
    r"|url|doi|uuid|repo_url|datasets|parameter_count)": "describe the model",
    r"general\.(license|source|base_model|dataset)(\..+)?": "say where the model comes from",
    r"general\.(file_type|quantization_version)": "each tensor has its own type",
    r"general\.tensor_extra\..+": "say how precisely another program computes",
    r"general\.sampling\..+": "advise on sampling, which the caller decides",
    r"(quantize\.)?imatrix\..+": "say how the file was quantized",
    r"mradermacher\..+": "say who quantized the file, and when",
    r"split\.(no|count|tensors\.count)": "read with the header: the file is whole",
    r"tokenizer\..+": "what the tokenizer does not use is refused there (models/gguf/tokenizer_keys.py)",
}
_KNOWN = re.compile("|".join(f"(?:{pattern})" for pattern in WITHOUT_EFFECT))
MODEL = "model"


def require_all_used(file: GGUFFile, architecture: Architecture, used: Iterable[str]) -> None:
    """Raise ModelError for a key that the table does not read and that is not known to be without effect."""
    kind = file.get("general.type", MODEL)
    if kind != MODEL:
        raise ModelError(f"{str(file.path)!r} says general.type {kind!r}; give the file of the model itself")
    prefix = f"{architecture.name}."
    done = {"general.type", *used, *(prefix + suffix for suffix in architecture.without_effect)}
    unread = [key for key in file.metadata if key not in done and not _KNOWN.fullmatch(key)]
    if unread:
        listed = ", ".join(f"{key} {shown(_short(file, key))}" for key in unread[:5])
        raise ModelError(
            f"{str(file.path)!r} says what this version does not compute with: {listed}; give the model's directory or "
            "hub id in Hugging Face format, without this file"
        )


def _short(file: GGUFFile, key: str) -> object:
    value = file.get(key)
    return list(value[:8]) if isinstance(value, tuple | list) else value
