"""Lists the GGUF metadata keys that do not affect the computation, and refuses other keys that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.declaration import Architecture, shown
from hetero_kv.models.gguf.file import GGUFFile

#: Regular expression for keys -> why they have no effect, or which module reads them.
WITHOUT_EFFECT = {
    r"general\.(architecture|alignment)": "read with the header",
    r"general\.(name|basename|finetune|author|version|organization|description|quantized_by|size_label|tags|languages"
    r"|url|doi|uuid|repo_url|datasets|parameter_count)": "describe the model",
    r"general\.(license|source|base_model|dataset)(\..+)?": "name the model's origin",
    r"general\.(file_type|quantization_version)": "each tensor has its own type",
    r"general\.tensor_extra\..+": "set the precision of another program",
    r"general\.sampling\..+": "recommend sampling settings, which the caller chooses",
    r"(quantize\.)?imatrix\..+": "describe the quantization",
    r"mradermacher\..+": "name the author and date of the quantization",
    r"split\.(no|count|tensors\.count)": "say how the model is divided into files, which are read as one",
    r"tokenizer\..+": "models/gguf/tokenizer_keys.py refuses the keys that the tokenizer does not use",
}
_KNOWN = re.compile("|".join(f"(?:{pattern})" for pattern in WITHOUT_EFFECT))


def require_all_used(file: GGUFFile, architecture: Architecture, used: Iterable[str]) -> None:
    """Raise ModelError for a key that the architecture's table does not read and that may have an effect."""
    prefix = f"{architecture.name}."
    done = {
        "general.type",
        *used,
        *architecture.scalars.values(),
        *(prefix + suffix for suffix in architecture.without_effect),
    }
    unread = [key for key in file.metadata if key not in done and not _KNOWN.fullmatch(key)]
    if unread:
        listed = ", ".join(f"{key} {shown(_short(file, key))}" for key in unread[:5])
        raise ModelError(
            f"{str(file.path)!r} has metadata that this version does not support: {listed}; give the model's directory "
            "or hub id in Hugging Face format, without this file"
        )


def _short(file: GGUFFile, key: str) -> object:
    value = file.get(key)
    return list(value[:8]) if isinstance(value, tuple | list) else value
