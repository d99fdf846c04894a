"""How much a method attends to."""

from __future__ import annotations

from hetero_kv.adapter import bridge
from hetero_kv.families.shadowkv.partition import chunk_budget, first_context_end
from hetero_kv.operators import BoundedAttention, RetrievalAttention, ShadowKVAttention
from hetero_kv.rules.injection import Injection


def attended_tokens(injection: Injection, length: int) -> float | None:
    """Tokens that a decode step attends to when `length` are stored, the mean over the model's layers.

    Of a prompt; what is generated comes on top in ShadowKV, and a bounded layer may hold less (a distilled pot). None
    where an operator's budget is not known.
    """
    layers = bridge.text_config(injection.model).num_hidden_layers
    attended = [length] * layers
    for operator in injection.attention_operators():
        window = bridge.layer_window(operator.wrapped)
        if isinstance(operator, RetrievalAttention):
            attended[operator.layer_idx] = _retrieved(operator, length)
        elif isinstance(operator, ShadowKVAttention):
            attended[operator.layer_idx] = _chosen(operator, length)
        elif isinstance(operator, BoundedAttention):
            attended[operator.layer_idx] = min(length, operator.policy.budget_for(length))
        elif window is not None:
            attended[operator.layer_idx] = min(window, length)
        else:
            return None
    return sum(attended) / layers


def _retrieved(operator: RetrievalAttention, length: int) -> int:
    settings = operator.settings
    if operator.budget is None:
        return length
    initial = -(-settings.initial_len // settings.block_size) * settings.block_size
    # A block leaves Local as a whole, when local_windows_len tokens follow it.
    context = max(0, (length - settings.local_windows_len) // settings.block_size * settings.block_size - initial)
    return length - context + min(context, operator.budget * settings.block_size)


def _chosen(operator: ShadowKVAttention, length: int) -> int:
    settings = operator.settings
    context, chunk = first_context_end(length, settings), settings.landmark_chunk_size
    chunks = context // chunk
    outliers = min(settings.outlier_chunks, chunks)
    return length - context + chunk * (outliers + min(chunks - outliers, chunk_budget(length, chunks, settings)))
