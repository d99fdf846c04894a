"""`python -m tests.support.gguf_models.compare DIRECTORY [NAME ...]`: compare with llama.cpp's converter.

`DIRECTORY` has a folder for each model: `hf/` in Hugging Face format, and `model.gguf`, which llama.cpp's converter
wrote from it in any type. Needs nothing of llama.cpp; the suite does not run it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.support.gguf_models.conversion import metadata, tensors
from tests.support.gguf_models.layouts import LAYOUTS

F32 = gguf.GGMLQuantizationType.F32
#: Not of the model: names, versions, the vocabulary.
NOT_COMPARED = ("GGUF.", "general.", "tokenizer.")
#: Rounding of functions that two libraries compute: factors of rotations, and exponentials.
TOLERANCE = 1e-6


def differences(folder: Path) -> list[str]:
    """What differs between the file in `folder` and the one that this package would write; a line each."""
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype="float32")
    reader = gguf.GGUFReader(folder / "model.gguf")
    theirs = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith(NOT_COMPARED)
    }  # fmt: skip
    lines = _compared("key", theirs, metadata(model.config), _same_value)
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    ours = {name: gguf.quantize(tensor, kinds.get(name, F32)) for name, tensor in tensors(model).items()}
    return lines + _compared("tensor", stored, ours, _same_tensor)


def _compared(what: str, theirs: dict[str, Any], ours: dict[str, Any], same: Any) -> list[str]:
    lines = [f"{what} {name} is missing" for name in sorted(theirs.keys() - ours.keys())]
    lines += [f"{what} {name} is ours alone" for name in sorted(ours.keys() - theirs.keys())]
    both = sorted(theirs.keys() & ours.keys())
    return lines + [
        f"{what} {name} is {_shown(theirs[name])} there and {_shown(ours[name])} here"
        for name in both
        if not same(theirs[name], ours[name])
    ]


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return bool(np.isclose(one, other, rtol=TOLERANCE, atol=0))
    return type(one) is type(other) and one == other


def _same_tensor(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=TOLERANCE, atol=0))


def _shown(value: Any) -> str:
    return f"{list(value.shape)}, from {value.flat[0]}" if isinstance(value, np.ndarray) else repr(value)


def main() -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    compared, without = [], []
    names = sys.argv[2:] or sorted(path.parent.name for path in Path(sys.argv[1]).glob("*/model.gguf"))
    for folder in [Path(sys.argv[1]) / name for name in names]:
        if AutoConfig.from_pretrained(folder / "hf").model_type not in LAYOUTS:
            without.append(folder.name)
            continue
        lines = differences(folder)
        compared.append(bool(lines))
        print(f"{folder.name}: {'; '.join(lines) or 'equal'}")
    print(f"{len(compared)} compared, {sum(compared)} differ; no layout for {', '.join(without) or 'none'}")
    return 1 if any(compared) else 0


if __name__ == "__main__":
    sys.exit(main())
