"""How much a method attends to."""

from __future__ import annotations

from hetero_kv.adapter import bridge
from hetero_kv.rules.injection import Injection


def attended_tokens(injection: Injection, length: int) -> float:
    """Tokens that a decode step attends to behind a prompt of `length` tokens, the mean over the model's layers.

    Layers without an operator attend to everything, or to the model's own window.
    """
    layers = bridge.text_config(injection.model).num_hidden_layers
    attended: list[float] = [length] * layers
    operators = {operator.layer_idx: operator for operator in injection.attention_operators()}
    for module in injection.model.modules():
        if not bridge.is_attention(module):
            continue
        if module.layer_idx in operators:
            attended[module.layer_idx] = operators[module.layer_idx].attended_tokens(length)
        elif (window := bridge.layer_window(module)) is not None:
            attended[module.layer_idx] = min(window, length)
    return sum(attended) / layers
