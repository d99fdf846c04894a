"""What a rule can put into a model, one file per operator."""

from hetero_kv.operators.base import AttentionOperator, Operator
from hetero_kv.operators.bounded_attention import BoundedAttention
from hetero_kv.operators.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.operators.chunked_module import ChunkedModule
from hetero_kv.operators.retrieval_attention import RetrievalAttention
from hetero_kv.operators.shadowkv_attention import ShadowKVAttention
from hetero_kv.operators.sliding_window_attention import SlidingWindowAttention

__all__ = [
    "AttentionOperator",
    "BoundedAttention",
    "ChunkedDecoderLayer",
    "ChunkedModule",
    "Operator",
    "RetrievalAttention",
    "ShadowKVAttention",
    "SlidingWindowAttention",
]
