"""Loads a model and its tokenizer by name or path."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hetero_kv.models.config_contract import require_weights
from hetero_kv.models.configuration import config_of, loading_errors, open_gguf, origin_of
from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.model_files import encoders, gguf_models
from hetero_kv.models.gguf.opening import Opening, keep_opening, kept_opening
from hetero_kv.models.gguf.tokenizer import fast_tokenizer, tokenizer_parts
from hetero_kv.models.gguf.vocabulary import suppressed_ids, token_id
from hetero_kv.models.gguf.weight_loading import load_weights
from hetero_kv.models.gguf.weights import WeightMap
from hetero_kv.models.initial_values import NothingDrawn
from hetero_kv.models.locating import Location, locate
from hetero_kv.models.named import DEFAULT_MODEL
from hetero_kv.models.packed_cache import PackedCache
from hetero_kv.models.parameters import require_finite
from hetero_kv.models.placing import DRAM, GPU, placed
from hetero_kv.models.precision import resolve_device, resolve_dtype
from hetero_kv.models.progress import ProgressReport, reporting
from hetero_kv.models.safetensors_weights import TensorFiles
from hetero_kv.models.templates import start_renderer
from hetero_kv.models.turns import end_of_turn_ids

_logger = logging.getLogger(__name__)

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class OpenedModel:
    """A causal language model without its weights, so that rules can be injected before the weights are loaded.

    Attributes:
        model: in eval mode; parameters are on the meta device, buffers on the CPU. If transformers must load the
            weights itself, the model is loaded already, on its device.
        tokenizer, name, context_length: as in `LoadedModel`.
        load_weights: loads the weights into `model`.
    """

    model: Any
    tokenizer: Any
    name: str
    context_length: int
    load_weights: Callable[[], None]

    def load(self) -> LoadedModel:
        """Load the weights into the model's present modules; one with a method `load_blocks` gets quantized blocks.

        Raises:
            ModelError: the file does not contain this model's weights.
        """
        self.load_weights()
        return LoadedModel(self.model, self.tokenizer, self.name, self.context_length)


@dataclass(frozen=True)
class LoadedModel:
    """A transformers causal language model in eval mode on its device, its tokenizer, and its limits.

    `context_length` is the length that the model was trained for, tokens.
    """

    model: Any
    tokenizer: Any
    name: str
    context_length: int


def load_model(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    gguf_path: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: ProgressReport | None = None,
) -> LoadedModel:
    """Load a model in transformers' form; `hetero_kv.load_model` also injects rules and compiles the kernels.

    Args:
        name_or_path: a named model (`hetero_kv.models.NAMED_MODELS`; fetched into the cache if it is missing), a
            `.gguf` file, a directory in Hugging Face format, or a hub id (`organisation/name`).
        gguf_path: a `.gguf` file with the weights, or a directory with exactly one; `name_or_path` is then the
            directory or hub id of the configuration and the tokenizer.
        dtype: `auto`, `float32`, `bfloat16` or `float16`; see `resolve_dtype`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; see `resolve_device`.
        trust_remote_code: run Python code that comes with the model.
        progress: called with an activity, the bytes done and the total bytes; None draws a line on standard error.

    Raises:
        ModelError: the model cannot be found, fetched or loaded with these arguments.
    """
    arguments = (name_or_path, gguf_path, dtype, device, trust_remote_code, progress)
    return _opened(*arguments, defers_weights=False).load()


def open_model(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    gguf_path: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: ProgressReport | None = None,
    weights_device: str = GPU,
    experts_device: str = GPU,
    packed_cache: PackedCache | None = None,
) -> OpenedModel:
    """Build a model without its weights, so that rules can be injected before the weights are loaded.

    Weights that an operator keeps packed are then never unpacked. Loading is deferred for a GGUF file, and for a model
    in Hugging Face format whose tensors transformers does not convert; other models are loaded at once.

    Args:
        name_or_path, gguf_path, dtype, device, trust_remote_code, progress: as in `load_model`.
        weights_device: `gpu`, `dram` or `auto`; see `offloads_to_dram`. With the layers' weights in DRAM, the model
            computes only under rules that run its layers in chunks (`ChunkedDecoderLayer`).
        experts_device: `gpu`, `dram` or `auto`; see `experts_offload_to_dram`. With a mixture's experts in DRAM, the
            model computes only under rules that replace them (`QuantizedExperts`).
        packed_cache: where packed weights of a GGUF file are kept for later starts; None for nowhere.

    Raises:
        ModelError: the model cannot be found, fetched or built with these arguments.
    """
    arguments = (name_or_path, gguf_path, dtype, device, trust_remote_code, progress)
    return _opened(
        *arguments, defers_weights=True, weights_device=weights_device, experts_device=experts_device,
        packed_cache=packed_cache,
    )  # fmt: skip


def _opened(
    name_or_path: str | os.PathLike[str],
    gguf_path: str | os.PathLike[str] | None,
    dtype: str | torch.dtype,
    device: str,
    trust_remote_code: bool,
    progress: ProgressReport | None,
    defers_weights: bool,
    weights_device: str = GPU,
    experts_device: str = GPU,
    packed_cache: PackedCache | None = None,
) -> OpenedModel:
    on_device = resolve_device(device)
    if experts_device == DRAM and on_device.type == "cpu":
        raise ModelError(
            "experts_device is dram, but the model computes on the CPU, where all its weights are in DRAM; set "
            "experts_device to auto, or device to cuda"
        )
    torch_dtype = resolve_dtype(dtype, on_device)
    location = locate(name_or_path, gguf_path, progress)
    # The tokens that end a turn are read from the chat template.
    start_renderer()
    weights: WeightMap | None = None
    tensor_files: TensorFiles | None = None
    opening = None if location.gguf is None else kept_opening(location.gguf)
    with open_gguf(location, opening) as gguf, loading_errors(location):
        config = config_of(location, gguf, trust_remote_code)
        if gguf is not None and location.pretrained is None:
            tokenizer: Any = _tokenizer(gguf, opening, packed_cache)
        else:
            tokenizer = AutoTokenizer.from_pretrained(**origin_of(location), trust_remote_code=trust_remote_code)
        if gguf is not None:
            model = _weightless(config, torch_dtype, trust_remote_code)
            weights = WeightMap.of(model, gguf)
            _tell_of_encoder(gguf)
            if not defers_weights:
                # Rules injected later cannot keep these weights packed, and warn of it.
                model.hetero_kv_unpacked = gguf.path
        elif defers_weights:
            model = _weightless(config, torch_dtype, trust_remote_code)
            tensor_files = TensorFiles.of(model, str(location.pretrained), location.offline)
        if weights is None and tensor_files is None:
            model = placed(
                _model(location, config, torch_dtype, trust_remote_code), on_device, weights_device, experts_device
            )
        _complete_generation_config(model, tokenizer, location, gguf, own=weights is None and tensor_files is None)
        model = model.eval()
        embeddings = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > embeddings:
            raise ModelError(
                f"the tokenizer of {location.pretrained or str(location.gguf)!r} has {len(tokenizer):,} tokens and the "
                f"weights have {embeddings:,}; give the configuration that belongs to "
                f"{str(location.gguf or location.pretrained)!r}"
            )
        limit = location.context_length or getattr(config.get_text_config(), "max_position_embeddings", None)
        context_length = int(limit or tokenizer.model_max_length)

    def load() -> None:
        if weights is None and tensor_files is None:
            return
        with loading_errors(location), reporting(location.name, progress) as report:
            if tensor_files is not None:
                tensor_files.load(model, torch_dtype, report)
            elif weights is not None and gguf is not None:
                load_weights(model, gguf, weights, torch_dtype, report, packed_cache)
            require_finite(model, location.name)
            placed(model, on_device, weights_device, experts_device)

    return OpenedModel(model, tokenizer, location.name, context_length, load)


def _tokenizer(file: GGUFFile, opening: Opening | None, cache: PackedCache | None) -> Any:
    """The tokenizer of a file, which is kept for later starts if there is a cache."""
    if opening is not None:
        return fast_tokenizer(opening.tokenizer)
    parts = tokenizer_parts(file)
    if cache is not None:
        keep_opening(Opening(file, parts), cache.limit)
    return fast_tokenizer(parts)


def _tell_of_encoder(file: GGUFFile) -> None:
    """Warn that images or sounds are not computed, if the model's encoder is in the folder of its file."""
    beside = list(file.path.parent.glob("*.gguf"))
    if (found := encoders(beside)) and len(gguf_models(beside)) == 1:
        _logger.warning(
            "%s: texts only; the encoder of images or sounds beside it is left out: %s",
            file.path,
            ", ".join(path.name for path in found),
        )


# A model changes some buffers as it runs, so they must not be inference tensors, even in a caller's inference mode.
@torch.inference_mode(False)
def _weightless(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model with its buffers, and with parameters on the meta device."""
    with init_empty_weights(include_buffers=False), NothingDrawn():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()  # the parameters above are new objects
    return model


def _model(location: Location, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    folder = Path(str(location.pretrained)).expanduser()
    if folder.is_dir():
        require_weights(folder, config, trust_remote_code)
    model, loading = AutoModelForCausalLM.from_pretrained(
        **origin_of(location),
        config=config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(
            f"{location.pretrained!r} has no weights for {len(missing)} parameters of "
            f"{type(model).__name__} ({', '.join(missing[:3])}, …); give weights that belong to the configuration"
        )
    return model


def _complete_generation_config(
    model: Any, tokenizer: Any, location: Location, gguf: GGUFFile | None, own: bool
) -> None:
    """Add every token that ends a turn to the tokens that end the generation.

    own: whether transformers has loaded the model's generation config.
    """
    if not own and location.pretrained is not None and _has_generation_config(location):
        model.generation_config = GenerationConfig.from_pretrained(
            location.pretrained, local_files_only=location.offline
        )
    settings = model.generation_config
    ends = set(_as_ids(settings.eos_token_id)) | set(_as_ids(tokenizer.eos_token_id)) | end_of_turn_ids(tokenizer)
    if gguf is not None and location.pretrained is None:
        ends |= {number for key in END_KEYS if (number := token_id(gguf, key)) is not None}
        settings.suppress_tokens = suppressed_ids(gguf) or settings.suppress_tokens
    settings.eos_token_id = sorted(ends) or None
    if settings.pad_token_id is None and ends:
        settings.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends)


def _has_generation_config(location: Location) -> bool:
    return (
        transformers.utils.cached_file(
            location.pretrained,
            "generation_config.json",
            local_files_only=location.offline,
            _raise_exceptions_for_missing_entries=False,
        )
        is not None
    )


def _as_ids(ids: int | Iterable[int] | None) -> Iterable[int]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else ids
