"""The operators that a rule can inject into a model, one file each."""

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
