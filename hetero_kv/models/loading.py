"""A model, its tokenizer and what is known of it, from a name or a path."""

from __future__ import annotations

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
from hetero_kv.models.configuration import config_of, origin_of, reading, refusing
from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.tokenizer import tokenizer_of
from hetero_kv.models.gguf.vocabulary import suppressed_ids, token_id
from hetero_kv.models.gguf.weights import WeightMap, load_weights
from hetero_kv.models.locating import Location, locate
from hetero_kv.models.named import DEFAULT_MODEL
from hetero_kv.models.placing import GPU, placed
from hetero_kv.models.precision import resolve_device, resolve_dtype
from hetero_kv.models.progress import ProgressReport, reporting
from hetero_kv.models.safetensors_weights import TensorFiles
from hetero_kv.models.turns import end_of_turn_ids

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class OpenedModel:
    """A causal language model that stands there without its weights, for rules to be put in before they come.

    Attributes:
        model: in eval mode; parameters are on the meta device, buffers on the CPU. A model that cannot be put together
            so is loaded already, where it will compute.
        tokenizer, name, context_length: as of `LoadedModel`.
    """

    model: Any
    tokenizer: Any
    name: str
    context_length: int
    load_weights: Callable[[], None]

    def load(self) -> LoadedModel:
        """Load the weights into what stands there now: a module with a method `load_blocks` takes quantized blocks.

        Raises:
            ModelError: the file does not hold this model's weights.
        """
        self.load_weights()
        return LoadedModel(self.model, self.tokenizer, self.name, self.context_length)


@dataclass(frozen=True)
class LoadedModel:
    """A transformers causal language model in eval mode on its device, its tokenizer, and its limits.

    `context_length` is the number of tokens the model was made for.
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
    """Load a model as transformers has it; `hetero_kv.load_model` also puts rules in and prepares it to answer.

    Args:
        name_or_path: a named model (`hetero_kv.models.NAMED_MODELS`; fetched into the cache when it is not there), a
            `.gguf` file, a directory in Hugging Face format, or a hub id (`organisation/name`).
        gguf_path: a `.gguf` file, or a directory with exactly one, to take the weights from; `name_or_path` is then
            the directory or hub id of the configuration and the tokenizer.
        dtype: `auto`, `float32`, `bfloat16` or `float16`; see `resolve_dtype`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; see `resolve_device`.
        trust_remote_code: run Python code that comes with the model. Never done unless asked for here.
        progress: called with an activity, the bytes done and the bytes in all; None draws a line on standard error.

    Raises:
        ModelError: the model cannot be found, fetched or loaded as asked.
    """
    asked = (name_or_path, gguf_path, dtype, device, trust_remote_code, progress)
    return _opened(*asked, numbers_wait=False).load()


def open_model(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    gguf_path: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: ProgressReport | None = None,
    weights_device: str = GPU,
) -> OpenedModel:
    """A model that rules can be put into before its weights are loaded, so that nothing is unpacked which an operator
    keeps packed. The arguments are those of `load_model`, and:

        weights_device: `gpu`, `dram` or `auto`; see `offloads_to_dram`. Where those of the layers lie in DRAM, the
            model computes only under rules that run its layers in chunks (`ChunkedDecoderLayer`).

    The weights of a GGUF file wait, and those of a model in Hugging Face format where transformers has nothing to
    convert in them; other models are loaded at once.

    Raises:
        ModelError: the model cannot be found, fetched or built as asked.
    """
    asked = (name_or_path, gguf_path, dtype, device, trust_remote_code, progress)
    return _opened(*asked, numbers_wait=True, weights_device=weights_device)


def _opened(
    name_or_path: str | os.PathLike[str],
    gguf_path: str | os.PathLike[str] | None,
    dtype: str | torch.dtype,
    device: str,
    trust_remote_code: bool,
    progress: ProgressReport | None,
    numbers_wait: bool,
    weights_device: str = GPU,
) -> OpenedModel:
    on_device = resolve_device(device)
    number_type = resolve_dtype(dtype, on_device)
    location = locate(name_or_path, gguf_path, progress)
    weights: WeightMap | None = None
    numbers: TensorFiles | None = None
    with reading(location) as gguf, refusing(location):
        config = config_of(location, gguf, trust_remote_code)
        if gguf is not None and location.pretrained is None:
            tokenizer: Any = tokenizer_of(gguf)
        else:
            tokenizer = AutoTokenizer.from_pretrained(**origin_of(location), trust_remote_code=trust_remote_code)
        if gguf is not None:
            model = _weightless(config, number_type, trust_remote_code)
            weights = WeightMap.of(model, gguf)
            if not numbers_wait:
                # Rules that would keep these weights packed come too late, and say so.
                model.hetero_kv_unpacked = gguf.path
        elif numbers_wait:
            model = _weightless(config, number_type, trust_remote_code)
            numbers = TensorFiles.of(model, str(location.pretrained), location.offline)
        if weights is None and numbers is None:
            model = placed(_model(location, config, number_type, trust_remote_code), on_device, weights_device)
        _complete_generation_config(model, tokenizer, location, gguf, own=weights is None and numbers is None)
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
        if weights is None and numbers is None:
            return
        with refusing(location), reporting(location.name, progress) as report:
            if numbers is not None:
                numbers.load(model, number_type, report)
            elif weights is not None and gguf is not None:
                load_weights(model, gguf, weights, number_type, report)
            placed(model, on_device, weights_device)

    return OpenedModel(model, tokenizer, location.name, context_length, load)


# Buffers that a model changes as it runs are no tensors of inference mode, even where the caller is in it.
@torch.inference_mode(False)
def _weightless(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model with its buffers and without memory for its parameters."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()  # every parameter above was made anew
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
    """Make every token that ends a turn end the generation.

    own: whether transformers gave the model its generation config when it loaded it.
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
