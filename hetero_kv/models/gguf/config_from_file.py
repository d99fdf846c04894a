"""Builds the transformers configuration of a GGUF file, and checks that a configuration agrees with a file."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures import architecture_of
from hetero_kv.models.gguf.architectures.declaration import ConfigSettings, MetadataReader, same, shown
from hetero_kv.models.gguf.architectures.rope import ROPE_TENSORS, head_dim_of, same_rope
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.ignored_keys import require_all_used
from hetero_kv.models.gguf.vocabulary import token_id

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
VOCABULARY = "tokenizer.ggml.tokens"
#: Setting -> key after `tokenizer.ggml.`.
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
#: Model type -> its class of a causal language model, where transformers' table of these lacks it.
UNREGISTERED = {"mistral4": "Mistral4ForCausalLM"}
#: Key -> its value in a causal language model; classifiers and encoders have others.
NOT_CAUSAL = {"attention.causal": True, "pooling_type": 0}


def settings_of(file: GGUFFile, config: Any | None = None) -> ConfigSettings:
    """The file's metadata as settings of its transformers model.

    Args:
        config: the text configuration that supplies what the file lacks; None if the file is the only source.

    Raises:
        ModelError: the architecture has no table, a key is missing, or this version cannot use a key.
    """
    architecture = architecture_of(file)
    metadata = MetadataReader(file, architecture, config)
    settings = ConfigSettings(metadata)
    rows, columns = _embedding_shape(file)
    metadata.expect("embedding_length", columns, f"is not the {columns} columns of {EMBEDDING}")
    settings.put("model_type", architecture.model_types[0])
    for suffix, name in architecture.keys.items():
        if suffix in architecture.optional and not metadata.has(suffix):
            continue
        settings.copy(name, suffix)
    try:
        architecture.settings(metadata, settings)
    except ArithmeticError as error:
        zeros = [key for key in sorted(metadata.used) if file.get(key) == 0]
        raise ModelError(
            f"{str(file.path)!r} has the size 0, which no model has ({', '.join(zeros)}); download the file again, or "
            "convert it again"
        ) from error
    for suffix, allowed in NOT_CAUSAL.items():
        metadata.expect(suffix, allowed, "is of a model that generates no text")
    metadata.expect("vocab_size", rows, f"is not the {rows} rows of {EMBEDDING}")
    settings.put("vocab_size", rows)
    settings.put("tie_word_embeddings", HEAD not in file.tensor_names)
    require_all_used(file, architecture, metadata.used)
    _require_possible(metadata)
    return settings


def _require_possible(metadata: MetadataReader) -> None:
    """Raise ModelError if numbers of the file contradict each other, or scale a rotation that the model lacks."""
    if unread := sorted((metadata.file.tensor_names & set(ROPE_TENSORS)) - metadata.read_tensors):
        raise ModelError(
            f"{str(metadata.file.path)!r} has the tensor {unread[0]}, which scales a rotation that models of "
            f"{metadata.architecture.name} do not have; convert it again"
        )

    def whole(suffix: str) -> int | None:
        value = metadata.file.get(metadata.key(suffix))
        return value if isinstance(value, int) else None

    experts, chosen = whole("expert_count"), whole("expert_used_count")
    if experts is not None and chosen is not None and not 1 <= chosen <= experts and (experts, chosen) != (0, 0):
        raise metadata.unsupported(
            "expert_used_count", f"is not from 1 to the {experts} of {metadata.key('expert_count')}"
        )
    heads, groups = whole("attention.head_count"), whole("attention.head_count_kv")
    if heads and groups is not None and (groups == 0 or heads % groups):
        key = metadata.key("attention.head_count")
        raise metadata.unsupported("attention.head_count_kv", f"does not divide the {heads} of {key}")


def configuration_of(file: GGUFFile) -> Any:
    """The configuration of a file that is the only source of its model. Raises ModelError as `settings_of`."""
    values = {name: value for name, value in settings_of(file).values.items() if value is not None or name in _NONE}
    for name, key in TOKENS.items():
        known = token_id(file, key) if VOCABULARY in file.metadata else None
        first = values.get(name, known)
        values[name] = first if known in (first, None) else [first, known]
    model_type = values.pop("model_type")
    config = AutoConfig.for_model(model_type, **values)
    if model_type in UNREGISTERED:
        AutoModelForCausalLM.register(type(config), getattr(transformers, UNREGISTERED[model_type]), exist_ok=True)
    return config


def adapt(config: Any, file: GGUFFile) -> None:
    """Check that a configuration agrees with the file of its weights, and take from the file what it alone decides.

    Raises ModelError if a value differs, or if the file belongs to another model.
    """
    text = config.get_text_config()
    architecture = architecture_of(file)
    if text.model_type not in architecture.model_types:
        raise ModelError(
            f"{str(file.path)!r} has weights of {' or '.join(architecture.model_types)} and the configuration is of "
            f"{text.model_type}; give the configuration that belongs to them"
        )
    settings = settings_of(file, text)
    for name, (key, value) in settings.from_file.items():
        other = getattr(text, name, None)
        if name == "rope_parameters":
            agree = same_rope(value, other or {}, head_dim_of(settings))
        else:
            agree = same(value, other) or (other is None and not value) or (name == "head_dim" and other is None)
        if not agree:
            raise ModelError(
                f"{str(file.path)!r} has {name} {shown(value)} ({key}) and the configuration {shown(other)}; give the "
                "configuration that belongs to it"
            )
    # A converter may omit an output matrix that equals the embedding, or write both.
    for each in (config, text):
        each.tie_word_embeddings = settings["tie_word_embeddings"]


#: Settings for which None is a value; if it were left out, the class would use another one.
_NONE = frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "q_lora_rank"})


def _embedding_shape(file: GGUFFile) -> tuple[int, int]:
    for tensor in file.tensors:
        if tensor.name == EMBEDDING:
            return tensor.shape[0], tensor.shape[-1]
    raise ModelError(f"{str(file.path)!r} has no tensor {EMBEDDING}; give the file of a whole model")
