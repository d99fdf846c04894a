"""The transformers configuration that a GGUF file says, and whether one given beside it says the same."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures import architecture_of
from hetero_kv.models.gguf.architectures.declaration import Said, Settings, same, shown
from hetero_kv.models.gguf.architectures.rotation import same_rotation
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.keys import require_all_used
from hetero_kv.models.gguf.vocabulary import token_id

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
VOCABULARY = "tokenizer.ggml.tokens"
#: Setting -> key behind `tokenizer.ggml.`.
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
#: Classifiers, encoders and the like are no language models.
NOT_CAUSAL = {"attention.causal": True, "pooling_type": 0}


def settings_of(file: GGUFFile, given: Any | None = None) -> Settings:
    """What the file says, as settings of its transformers model.

    Args:
        given: the text configuration that stands in for what the file does not say; None where the file says it all.

    Raises:
        ModelError: no table for the architecture, a key that is missing, or one that this version cannot use.
    """
    architecture = architecture_of(file)
    said = Said(file, architecture, given)
    settings = Settings(said)
    settings.put("model_type", architecture.model_types[0])
    for suffix, name in architecture.keys.items():
        if suffix in architecture.optional and not said.has(suffix):
            continue
        settings.copy(name, suffix)
    try:
        architecture.settings(said, settings)
    except ArithmeticError as error:
        zeros = [key for key in sorted(said.used) if file.get(key) == 0]
        raise ModelError(
            f"{str(file.path)!r} says 0 where a model has some ({', '.join(zeros)}); download the file again, or "
            "convert it again"
        ) from error
    for suffix, allowed in NOT_CAUSAL.items():
        said.only(suffix, allowed, "is of a model that generates no text")
    rows = _rows(file)
    said.only("vocab_size", rows, f"is not the {rows} rows of {EMBEDDING}")
    settings.put("vocab_size", rows)
    settings.put("tie_word_embeddings", HEAD not in file.tensor_names)
    require_all_used(file, architecture, said.used)
    _require_possible(said)
    return settings


def _require_possible(said: Said) -> None:
    """Raise ModelError where numbers that the file says do not go together."""

    def whole(suffix: str) -> int | None:
        value = said.file.get(said.key(suffix))
        return value if isinstance(value, int) else None

    experts, chosen = whole("expert_count"), whole("expert_used_count")
    if experts is not None and chosen is not None and not 1 <= chosen <= experts and (experts, chosen) != (0, 0):
        raise said.refused("expert_used_count", f"is not from 1 to the {experts} of {said.key('expert_count')}")
    heads, groups = whole("attention.head_count"), whole("attention.head_count_kv")
    if heads and groups is not None and (groups == 0 or heads % groups):
        key = said.key("attention.head_count")
        raise said.refused("attention.head_count_kv", f"does not divide the {heads} of {key}")


def configuration_of(file: GGUFFile) -> Any:
    """The configuration of the model whose file says it all. Raises ModelError as `settings_of` does."""
    values = {name: value for name, value in settings_of(file).values.items() if value is not None or name in _NONE}
    for name, key in TOKENS.items():
        values[name] = token_id(file, key) if VOCABULARY in file.metadata else None
    return AutoConfig.for_model(values.pop("model_type"), **values)


def adapt(config: Any, file: GGUFFile) -> None:
    """Make a configuration given beside a file the one of its weights, where the file alone decides.

    Raises ModelError where the file says something else, or is another model's.
    """
    text = config.get_text_config()
    architecture = architecture_of(file)
    if text.model_type not in architecture.model_types:
        raise ModelError(
            f"{str(file.path)!r} has weights of {' or '.join(architecture.model_types)} and the configuration is of "
            f"{text.model_type}; give the configuration that belongs to them"
        )
    settings = settings_of(file, text)
    for name, (key, value) in settings.said.items():
        other = getattr(text, name, None)
        if name == "rope_parameters":
            dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            agree = same_rotation(value, other or {}, dim)
        else:
            agree = same(value, other) or (other is None and not value) or (name == "head_dim" and other is None)
        if not agree:
            raise ModelError(
                f"{str(file.path)!r} says {name} {shown(value)} ({key}) and the configuration {shown(other)}; give the "
                "configuration that belongs to it"
            )
    # A converter may leave out an output matrix that equals the embedding, or write both.
    for each in (config, text):
        each.tie_word_embeddings = settings["tie_word_embeddings"]


#: Settings whose None means something, where the class would take another value.
_NONE = frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"})


def _rows(file: GGUFFile) -> int:
    for tensor in file.tensors:
        if tensor.name == EMBEDDING:
            return tensor.shape[0]
    raise ModelError(f"{str(file.path)!r} has no tensor {EMBEDDING}; give the file of a whole model")
