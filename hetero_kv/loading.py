"""Loads a model by name, with rules injected: the entry point for Python, the chat and evaluations."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetero_kv import models
from hetero_kv.errors import ConfigError
from hetero_kv.models import DEFAULT_MODEL, LoadedModel, OpenedModel, ProgressReport
from hetero_kv.models.packed_cache import PackedCache
from hetero_kv.models.precision import resolve_device, resolve_dtype
from hetero_kv.models.weightless import weightless_model
from hetero_kv.planning.experts_place import experts_place
from hetero_kv.planning.free_memory import free_dram, free_gpu
from hetero_kv.rules.experts_device import experts_device_of
from hetero_kv.rules.injecting import inject, inject_beside
from hetero_kv.rules.named_config import NamedConfig, config_in
from hetero_kv.rules.recipes import DEFAULT_RECIPE
from hetero_kv.rules.rule_set import RuleSet
from hetero_kv.settings.engine_settings import AUTO
from hetero_kv.threads import set_threads

_logger = logging.getLogger(__name__)
# Names of the number of experts in models' configurations.
_NUMBERS_OF_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
# The share of the free DRAM up to which packed weights are copied into it; larger ones are mapped from the disk.
_SHARE_FOR_WEIGHTS = 0.8


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
    keeps_trials: bool = False,
    **settings: Any,
) -> LoadedModel:
    """Load a model. With `config`, inject the rules, keep packed weights as stored, and compile the kernels.

    Args:
        name_or_path, gguf_path, dtype, device, trust_remote_code, progress: see `hetero_kv.models.load_model`;
            `progress` also reports kernels, as modules done and modules in total.
        config: a recipe's name, the path of a rules file, either with its own settings
            (`"quest:top_k_blocks=64"`), or rules that were read. None leaves the model as transformers has it,
            with unpacked weights.
        trust_rules: the user's modules whose operators the rules may name (`load_rules`).
        settings_file: settings that the rules override.
        keeps_trials: whether what trials of fast paths show is kept for later starts; no code of others may then have
            changed torch, transformers or their classes in this process.
        settings: settings that override the rules, by name: `max_seq_len=32768`, `kv_type="Q8_0"`, `threads_num=4`, …
            (docs/configuration.md).

    With `config`, torch and the kernels use `threads_num` threads from then on, in the whole process.

    Raises:
        ConfigError: a mistake in the rules or a setting, or settings without `config`; raised before opening the model.
        ModelError: the model cannot be found, fetched or loaded in this form.
        HeteroKVError: the rules do not fit the model.
    """
    arguments: dict[str, Any] = {
        "gguf_path": gguf_path,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "progress": progress,
    }
    if config is None:
        _refuse_without_config("load_model", settings)
        return models.load_model(name_or_path, **arguments)
    rules: dict[str, Any] = {
        "config": config,
        "trust_rules": trust_rules,
        "settings_file": settings_file,
        "keeps_trials": keeps_trials,
    }
    return open_model(name_or_path, **arguments, **rules, **settings).load()


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
    keeps_trials: bool = False,
    **settings: Any,
) -> OpenedModel:
    """Like `load_model`, but without weights: `load()` loads them, and compiles the kernels during and after that.

    Without `config`, rules can be injected before the weights are loaded (`inject`), so that weights which an
    operator keeps packed are never unpacked. `weights_device` and `experts_device` are the only settings then
    (`hetero_kv.models.open_model`).

    Raises the errors of `load_model`.
    """
    arguments: dict[str, Any] = {
        "gguf_path": gguf_path,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "progress": progress,
    }
    if config is None:
        _refuse_without_config("open_model", settings.keys() - {"weights_device", "experts_device"})
        return models.open_model(name_or_path, **arguments, **settings)
    chosen = config_in(config, trust_rules)
    command_line = chosen.command_line(settings)
    engine = chosen.rules.engine_settings(command_line=command_line, settings_file=settings_file)
    threads = engine.resolved_threads()
    if engine.threads_num != "auto" and engine.threads_num > threads:
        _logger.warning(
            "threads_num is %d; as many threads compute as this process may use CPUs: %d",
            engine.threads_num,
            threads,
        )
    set_threads(threads)
    cache = PackedCache(limit=round(engine.packed_cache_gb * 1e9), room=round(_SHARE_FOR_WEIGHTS * free_dram()))
    chosen = replace(chosen, settings=command_line)
    experts_device = experts_device_of(chosen.rules, engine)
    if experts_device == AUTO and torch.cuda.is_available():
        experts_device = _planned_experts(name_or_path, arguments, chosen, settings_file)
    opened = models.open_model(
        name_or_path, **arguments, weights_device=engine.weights_device, experts_device=experts_device,
        packed_cache=cache,
    )  # fmt: skip
    injection = inject(opened.model, chosen, settings_file=settings_file)

    def load_weights() -> None:
        with injection.preparation.beginning():
            opened.load_weights()
        with injection.trials_kept() if keeps_trials else nullcontext():
            injection.compile_kernels(progress)

    return replace(opened, load_weights=load_weights)


def _planned_experts(
    name_or_path: str | os.PathLike[str],
    arguments: Mapping[str, Any],
    rules: NamedConfig,
    settings_file: Mapping[str, Any] | None,
) -> str:
    """The setting `experts_device` in force, as `hetero-kv plan` has it; `auto` on a CPU, or without experts.

    Args:
        arguments: of `hetero_kv.models.open_model`.
    """
    device = resolve_device(arguments["device"])
    source = {name: arguments[name] for name in ("gguf_path", "trust_remote_code")}
    if device.type != "cuda":
        return AUTO
    config = models.model_config(name_or_path, **source, progress=arguments["progress"]).get_text_config()
    if not any(getattr(config, name, None) for name in _NUMBERS_OF_EXPERTS):
        return AUTO
    weightless = weightless_model(name_or_path, **source)
    injection = inject(weightless.model, rules, settings_file=settings_file)
    dtype = resolve_dtype(arguments["dtype"], device)
    return experts_place(injection, dtype, weightless.stored, free_dram(), free_gpu(str(device)))


def with_rules(
    loaded: LoadedModel,
    config: str | Path | RuleSet | NamedConfig,
    *,
    trust_rules: Collection[str] = (),
    settings_file: Mapping[str, Any] | None = None,
    progress: ProgressReport | None = None,
    **settings: Any,
) -> LoadedModel:
    """The same model under other rules, beside its present ones: both compute with the same weights in memory.

    Each of the two has its own modules, operators, caches and store; ejecting one leaves the other. Adapters, hooks and
    changes of the config that come later belong to one of them; a parameter that is changed in place changes in both.

    Args:
        loaded: with or without rules.
        config, trust_rules, settings_file, progress, settings: as `load_model`.

    Raises:
        ConfigError: as `load_model`; or `threads_num`, `weights_device` or `experts_device`, which are the process's
            and the weights', differ from those of `loaded`.
        InjectionError: the rules keep weights in another form (`weights`) than those of `loaded`, or hooks or other
            code prevent that the weights are shared.
        HeteroKVError: the rules do not fit the model.
    """
    chosen = config_in(config, trust_rules)
    command_line = chosen.command_line(settings)
    engine = chosen.rules.engine_settings(command_line=command_line, settings_file=settings_file)
    present = getattr(loaded.model, "hetero_kv_injection", None)
    if present is None:
        set_threads(engine.resolved_threads())
    else:
        _require_equal("threads_num", engine.resolved_threads(), present.engine.resolved_threads())
        _require_equal("weights_device", engine.weights_device, present.engine.weights_device)
        _require_equal("experts_device", engine.experts_device, present.engine.experts_device)
    injection = inject_beside(loaded.model, replace(chosen, settings=command_line), settings_file=settings_file)
    injection.compile_kernels(progress)
    return replace(loaded, model=injection.model)


def _require_equal(name: str, value: object, present: object) -> None:
    if value != present:
        raise ConfigError(
            f"{name} is {value} under these rules, and {present} under those of the model whose weights are shared; "
            "give both the same"
        )


def _refuse_without_config(function: str, settings: Collection[str]) -> None:
    if settings:
        raise ConfigError(
            f"{function}: {', '.join(sorted(settings))}: settings of rules, and config is missing, so no rules are "
            f"injected; give config={DEFAULT_RECIPE!r}, or leave them out"
        )
