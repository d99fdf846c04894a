"""Loads the tensors of a model in Hugging Face format into a model that is built without weights, one by one.

A module with a method `load_numbers` gets its weight from the file, and may quantize it, so that memory never holds
the whole model unquantized. This requires that every parameter is a tensor of the same name and shape in safetensors
files. Transformers loads models whose tensors it converts, merges or keeps in float32.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from hetero_kv.models.parameters import require_all_loaded, set_parameter, tie, tied_parameters
from hetero_kv.models.progress import ProgressReport

_TYPES = {"F32", "F16", "BF16"}
_IN_FLOAT32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


class TensorFiles:
    """Maps the parameters and buffers of a model to their files.

    Attributes:
        files: name -> file.
        folder: the files' folder.
    """

    def __init__(self, files: dict[str, Path], folder: Path) -> None:
        self.files, self.folder = files, folder

    @classmethod
    def of(cls, model: Any, pretrained: str, offline: bool) -> TensorFiles | None:
        """The files of a model on the meta device; None if transformers must load it."""
        if model.is_custom_code() or getattr(model.config, "quantization_config", None) is not None:
            return None
        if _is_converted(model) or any(getattr(model, name, None) for name in _IN_FLOAT32):
            return None
        paths = _safetensors_files(pretrained, offline)
        tensors: dict[str, tuple[Path, list[int]]] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                    if any(each.get_dtype() not in _TYPES for each in slices.values()):
                        return None
                    tensors |= {name: (path, each.get_shape()) for name, each in slices.items()}
            except (SafetensorError, OSError):
                return None  # transformers reports the error
        expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        for name in tied_parameters(model):
            expected.pop(name, None)
            tensors.pop(name, None)
        if {name: shape for name, (_, shape) in tensors.items()} != expected:
            return None
        for parameter in model.parameters():
            parameter.comes_as_numbers = True
        return cls({name: path for name, (path, _) in tensors.items()}, paths[0].parent)

    def load(self, model: Any, dtype: torch.dtype, report: ProgressReport) -> None:
        """Load the tensors into `model`, whose parameters are on the meta device; it may be injected already.

        Args:
            dtype: the dtype of parameters that stay unquantized.
            report: called with "reading weights", the bytes done and the total bytes.

        Raises ModelError if parameters are left without weights.
        """
        tied = tied_parameters(model)
        done, total = 0, sum(path.stat().st_size for path in set(self.files.values()))
        for path in sorted(set(self.files.values())):
            with safe_open(path, framework="pt") as file:
                for name in (name for name, where in self.files.items() if where == path):
                    tensor = file.get_tensor(name)
                    _put(model, name, tensor, dtype)
                    done += tensor.nbytes
                    report("reading weights", min(done, total), total)
        for place, source in tied.items():
            tie(model, place, source)
        require_all_loaded(model, self.folder)


def _put(model: nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    path, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if leaf == "weight" and (load_numbers := getattr(module, "load_numbers", None)) is not None:
        load_numbers(tensor, dtype)
    elif leaf in module._buffers:
        module._buffers[leaf].copy_(tensor)
    else:
        # A copy, since the file is mapped and may be removed.
        set_parameter(module, leaf, nn.Parameter(tensor.to(dtype, copy=True), requires_grad=False))


def _is_converted(model: Any) -> bool:
    """Whether transformers renames or converts tensors of this model when it loads them; True if unknown."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return True
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _safetensors_files(pretrained: str, offline: bool) -> list[Path]:
    """The files with the model's tensors; [] if it has no safetensors files."""
    options: dict[str, Any] = {"local_files_only": offline, "_raise_exceptions_for_missing_entries": False}
    single = cached_file(pretrained, SAFE_WEIGHTS_NAME, **options)
    if single is not None:
        return [Path(single)]
    with suppress(OSError):
        index = cached_file(pretrained, SAFE_WEIGHTS_INDEX_NAME, **options)
        if index is not None:
            shards, _ = get_checkpoint_shard_files(pretrained, index, local_files_only=offline)
            return [Path(shard) for shard in shards]
    return []
