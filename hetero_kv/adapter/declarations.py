"""The declarations of the operators that replace modules other than attention."""

from __future__ import annotations

from hetero_kv.adapter.weight_settings import WeightSettings
from hetero_kv.settings.declaration import OperatorDeclaration

CHUNKED_DECODER_LAYER = OperatorDeclaration(
    "ChunkedDecoderLayer",
    "hetero_kv.adapter.chunked_decoder_layer",
    "runs a decoder layer over the prompt in chunks of chunk_size, layer by layer",
)
CHUNKED_MODULE = OperatorDeclaration(
    "ChunkedModule",
    "hetero_kv.adapter.chunked_module",
    "runs a token-wise module (the final norm) over the prompt in chunks of chunk_size",
)
QUANTIZED_EMBEDDING = OperatorDeclaration(
    "QuantizedEmbedding",
    "hetero_kv.adapter.quantized_matrix",
    "an embedding whose weights stay quantized as their file holds them, or are quantized",
    WeightSettings,
)
QUANTIZED_EXPERTS = OperatorDeclaration(
    "QuantizedExperts",
    "hetero_kv.adapter.quantized_experts",
    "a mixture's experts, whose weights stay quantized as their file holds them, or are quantized",
    WeightSettings,
)
QUANTIZED_LINEAR = OperatorDeclaration(
    "QuantizedLinear",
    "hetero_kv.adapter.quantized_matrix",
    "a linear layer whose weights stay quantized as their file holds them, or are quantized",
    WeightSettings,
)
