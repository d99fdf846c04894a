"""The front door for Python, the chat and evaluations: a model by its name, with rules in it and ready to answer."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetero_kv import models
from hetero_kv.errors import ConfigError
from hetero_kv.models import DEFAULT_MODEL, LoadedModel, OpenedModel, ProgressReport
from hetero_kv.rules.injection import inject
from hetero_kv.rules.named_config import NamedConfig, config_in
from hetero_kv.rules.recipes import DEFAULT_RECIPE
from hetero_kv.rules.rule_set import RuleSet
from hetero_kv.threads import set_threads


def load_model(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    config: str | Path | RuleSet | NamedConfig | None = None,
    gguf_path: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    trust_rules: Collection[str] = (),
    settings_file: Mapping[str, Any] | None = None,
    progress: ProgressReport | None = None,
    **settings: Any,
) -> LoadedModel:
    """Load a model; with `config`, as the chat does: rules put in, weights packed as stored, kernels compiled.

    Args:
        name_or_path, gguf_path, dtype, device, trust_remote_code, progress: as of `hetero_kv.models.load_model`;
            kernels are reported too, in modules done and modules in all.
        config: a recipe's name, the path of a rules file, either with settings of its own
            (`"quest:second_block_count=64"`), or rules that were read. None leaves the model as transformers has it,
            its weights unpacked.
        trust_rules: modules of the user's own whose operators the rules may name (`load_rules`).
        settings_file: settings that the rules win over.
        settings: settings that win over the rules, under their own names: `max_seq_len=32768`, `kv_type="Q8_0"`,
            `threads_num=4`, … (docs/configuration.md).

    With `config`, torch and the kernels use `threads_num` threads from then on, in the whole process.

    Raises:
        ConfigError: a mistake in the rules or in a setting, or settings without `config`; before the model is opened.
        ModelError: the model cannot be found, fetched or loaded as asked.
        HeteroKVError: the rules do not fit the model.
    """
    asked: dict[str, Any] = {
        "gguf_path": gguf_path,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "progress": progress,
    }
    if config is None:
        _refuse_without_config("load_model", settings)
        return models.load_model(name_or_path, **asked)
    rules: dict[str, Any] = {"config": config, "trust_rules": trust_rules, "settings_file": settings_file}
    return open_model(name_or_path, **asked, **rules, **settings).load()


def open_model(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    config: str | Path | RuleSet | NamedConfig | None = None,
    gguf_path: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    trust_rules: Collection[str] = (),
    settings_file: Mapping[str, Any] | None = None,
    progress: ProgressReport | None = None,
    **settings: Any,
) -> OpenedModel:
    """As `load_model`, without the weights yet: `load()` loads them, and compiles the kernels meanwhile and behind.

    Without `config` rules can be put in before the weights come (`inject`), so that nothing is unpacked which an
    operator keeps packed; `weights_device` is the one setting then (`hetero_kv.models.open_model`).

    Raises as `load_model`.
    """
    asked: dict[str, Any] = {
        "gguf_path": gguf_path,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "progress": progress,
    }
    if config is None:
        _refuse_without_config("open_model", settings.keys() - {"weights_device"})
        return models.open_model(name_or_path, **asked, **settings)
    chosen = config_in(config, trust_rules)
    command_line = chosen.command_line(settings)
    engine = chosen.rules.engine_settings(command_line=command_line, settings_file=settings_file)
    set_threads(engine.resolved_threads())
    opened = models.open_model(name_or_path, **asked, weights_device=engine.weights_device)
    injection = inject(opened.model, chosen.rules, command_line=command_line, settings_file=settings_file)

    def load_weights() -> None:
        with injection.preparation.beginning():
            opened.load_weights()
        injection.compile_kernels(progress)

    return replace(opened, load_weights=load_weights)


def _refuse_without_config(function: str, settings: Collection[str]) -> None:
    if settings:
        raise ConfigError(
            f"{function}: {', '.join(sorted(settings))}: settings of rules, and config is not given, so that no rules "
            f"are put in; give config={DEFAULT_RECIPE!r}, or leave them out"
        )
