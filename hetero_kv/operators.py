"""The operators that a rule can inject into a model: their declarations, and their classes, imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hetero_kv.adapter.declarations import (
    CHUNKED_DECODER_LAYER,
    CHUNKED_MODULE,
    QUANTIZED_EMBEDDING,
    QUANTIZED_EXPERTS,
    QUANTIZED_LINEAR,
)
from hetero_kv.families.bounded.eviction.policy_settings import BOUNDED
from hetero_kv.families.infllm_stream.settings import INFLLM_STREAM
from hetero_kv.families.retrieval.settings import RETRIEVAL
from hetero_kv.families.self_extend.settings import SELF_EXTEND
from hetero_kv.families.shadowkv.settings import SHADOWKV
from hetero_kv.families.token_retrieval.choosers.chooser_settings import TOKEN_RETRIEVAL
from hetero_kv.families.window.settings import SLIDING_WINDOW
from hetero_kv.settings.declaration import OperatorDeclaration

if TYPE_CHECKING:
    from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
    from hetero_kv.adapter.chunked_module import ChunkedModule
    from hetero_kv.adapter.operator import AttentionOperator
    from hetero_kv.adapter.quantized_experts import QuantizedExperts
    from hetero_kv.adapter.quantized_matrix import QuantizedEmbedding, QuantizedLinear
    from hetero_kv.adapter.replacement import Operator
    from hetero_kv.families.bounded.attention import BoundedAttention
    from hetero_kv.families.infllm_stream.attention import InfLLMStreamAttention
    from hetero_kv.families.retrieval.attention import RetrievalAttention
    from hetero_kv.families.self_extend.attention import SelfExtendAttention
    from hetero_kv.families.shadowkv.attention import ShadowKVAttention
    from hetero_kv.families.token_retrieval.attention import TokenRetrievalAttention
    from hetero_kv.families.window.attention import SlidingWindowAttention

__all__ = [
    "AttentionOperator",
    "BoundedAttention",
    "ChunkedDecoderLayer",
    "ChunkedModule",
    "InfLLMStreamAttention",
    "Operator",
    "QuantizedEmbedding",
    "QuantizedExperts",
    "QuantizedLinear",
    "RetrievalAttention",
    "SelfExtendAttention",
    "ShadowKVAttention",
    "SlidingWindowAttention",
    "TokenRetrievalAttention",
]

#: The operators by name, in alphabetical order.
DECLARATIONS: dict[str, OperatorDeclaration] = {
    declaration.name: declaration
    for declaration in (
        BOUNDED,
        CHUNKED_DECODER_LAYER,
        CHUNKED_MODULE,
        INFLLM_STREAM,
        QUANTIZED_EMBEDDING,
        QUANTIZED_EXPERTS,
        QUANTIZED_LINEAR,
        RETRIEVAL,
        SELF_EXTEND,
        SHADOWKV,
        SLIDING_WINDOW,
        TOKEN_RETRIEVAL,
    )
}
_BASES = {"AttentionOperator": "hetero_kv.adapter.operator", "Operator": "hetero_kv.adapter.replacement"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    declared = DECLARATIONS.get(name)
    value = declared.load() if declared else getattr(importlib.import_module(_BASES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
