"""The number of tokens that a method attends to."""

from __future__ import annotations

from statistics import fmean

from hetero_kv.adapter import attention_module
from hetero_kv.rules.injection import Injection


def attended_tokens(injection: Injection, length: int) -> float:
    """Tokens that a decode step attends to after a prompt of `length` tokens, the mean over the model's layers.

    Where each step chooses the number (retrieval's `target_mass`), it is the most that a step may attend to.
    Layers without an operator attend to all tokens, or to the model's sliding window. Layers without attention do not
    count.
    """
    config = attention_module.text_config(injection.model)
    windows = dict(enumerate(attention_module.own_windows(config)))
    operators = {operator.layer_idx: operator for operator in injection.attention_operators()}
    modules = injection.model.modules()
    layers = {module.layer_idx for module in modules if attention_module.is_attention(module)}
    return fmean(
        operators[index].attended_tokens(length) if index in operators else min(length, windows.get(index) or length)
        for index in layers
    )
