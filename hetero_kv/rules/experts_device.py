"""Decides which experts get an operator because they are in DRAM; refuses `experts_device` where it has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hetero_kv.adapter.foreign import foreign_part
from hetero_kv.adapter.quantized_experts import QuantizedExperts
from hetero_kv.errors import ConfigError, UnsupportedModelError
from hetero_kv.rules.rule_set import RuleSet
from hetero_kv.settings.engine_settings import AUTO, DRAM, GPU, EngineSettings
from hetero_kv.weights.experts_form import experts_in, has_known_experts


def experts_in_dram(model: Any, experts: Mapping[str, nn.Module], engine: EngineSettings, rules: str) -> set[str]:
    """The paths of experts that an operator computes because they are in DRAM, or may get there when they are loaded.

    Args:
        model: the model before the rules are injected.
        experts: path -> module that the rules would replace by `QuantizedExperts`.
        rules: the rules as messages call them.

    Raises:
        ConfigError: `experts_device` is dram, and the model is on the CPU, or has no experts, or `weights_device` is
            dram too, or the rules leave the experts alone; or packed experts are elsewhere than it says.
        UnsupportedModelError: `experts_device` is dram, and the operator cannot compute the experts.
    """
    kind = next(model.parameters()).device.type
    if engine.experts_device == DRAM:
        _require_effect(model, experts, engine, rules, kind)
    if kind == "cpu":
        return set()
    found = set()
    for path, module in experts.items():
        present = model.get_submodule(path)
        is_there = kind == "cuda" and any(each.device.type == "cpu" for each in module.parameters())
        if isinstance(present, QuantizedExperts):
            _require_place(path, present.down.device.type, engine.experts_device)
            continue
        if is_there:
            _require_place(path, "cpu", engine.experts_device)
        is_known, part = has_known_experts(module), foreign_part(module)
        if is_known and part is None:
            if engine.experts_device == DRAM or is_there or (kind == "meta" and engine.experts_device == AUTO):
                found.add(path)
        elif engine.experts_device == DRAM:
            why = f"has {part}" if is_known else "keeps its experts in a form that is not known"
            raise UnsupportedModelError(
                f"experts_device is dram, but {path} ({type(module).__name__}) {why}, so they cannot be computed in "
                "DRAM; set experts_device to gpu"
            )
    return found


def _require_place(path: str, kind: str, setting: str) -> None:
    """Raise ConfigError if experts are on a device of `kind`, and the setting says another one."""
    if setting != AUTO and kind in ("cpu", "cuda") and setting != (DRAM if kind == "cpu" else GPU):
        raise ConfigError(
            f"experts_device is {setting}, but {path} has its weights {'in DRAM' if kind == 'cpu' else 'on the GPU'} "
            "since the model was loaded or packed; set experts_device to auto, or load the model again"
        )


def experts_device_of(rules: RuleSet, engine: EngineSettings) -> str:
    """The setting `experts_device` for loading a model; under `auto`, experts without an operator stay on the GPU."""
    operators = [rule.operator for rule in rules.rules]
    is_read = any(each is not None and issubclass(each, QuantizedExperts) for each in operators)
    return engine.experts_device if is_read or engine.experts_device == DRAM else GPU


def _require_effect(
    model: Any, experts: Mapping[str, nn.Module], engine: EngineSettings, rules: str, kind: str
) -> None:
    if kind == "cpu":
        reason = (
            f"{type(model).__name__} is on the CPU, where all its weights are in DRAM; move it to a GPU before its "
            "rules are injected (hetero_kv.load_model does), or"
        )
    elif engine.weights_device == DRAM:
        reason = "weights_device is dram too, which streams experts with their layers;"
    elif not experts and any(True for _ in experts_in(model)):
        reason = f"{rules} injects no {QuantizedExperts.__name__}, which alone reads it; add a rule for experts, or"
    elif not experts:
        reason = f"{type(model).__name__} has no mixture of experts;"
    else:
        return
    raise ConfigError(f"experts_device is dram, but {reason} set experts_device to auto")
