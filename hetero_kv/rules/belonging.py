"""Checks that a cache belongs to the model that uses it, and words the errors for caches that do not."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from hetero_kv.errors import HeteroKVError, shown

if TYPE_CHECKING:
    from hetero_kv.rules.injection import Injection

_ANEW = "make one with HeteroCache(model)"
_ALONG = (
    "cache.save(path) and HeteroCache.load(path, model) keep its tokens if the new rules store them in the same way"
)


def require_own(made: Injection, now: Injection) -> None:
    """Raise HeteroKVError, naming the difference, if a cache made under `made` does not fit the model of `now`.

    A cache fits after equal rules are injected into the same model again.
    """
    if text := difference(made, now):
        along = "" if made.model is not now.model else f"; {_ALONG}"
        raise HeteroKVError(f"the HeteroCache does not belong to this model: {text}; {_ANEW}{along}")


def stray_cache(made: Injection) -> HeteroKVError:
    """The error for a model that writes to a cache outside a forward under `made`."""
    name = described(made.model)
    if made.is_in_place:
        return HeteroKVError(
            f"the HeteroCache of {name} was passed to a model without its rules (another model, or a part that was "
            f"called alone); pass it to the injected model, or inject this one and {_ANEW}"
        )
    return HeteroKVError(
        f"the HeteroCache was passed to a model without its rules: those of {name}, under which it was made, have been "
        "ejected; leave past_key_values out for the untouched model, or inject the rules again and "
        f"{_ANEW}. {_ALONG[0].upper()}{_ALONG[1:]}"
    )


def difference(made: Injection, now: Injection) -> str | None:
    """Describes the first difference in model, operators or settings between `made` and `now`; None if equal."""
    if made.model is not now.model:
        return f"it was made for {described(made.model)}, and this is {described(now.model)}"
    for path in dict.fromkeys([*made.operators, *now.operators]):
        before, after = (each.operators.get(path) for each in (made, now))
        if before is None or after is None or type(before) is not type(after):
            names = [type(each).__name__ if each is not None else "no operator" for each in (before, after)]
            return f"{path} had {names[0]} when it was made, and has {names[1]} now"
        if text := _changed(before.settings, after.settings):
            return f"{path} ({type(before).__name__}) had {text}"
    text = _changed(made.engine, now.engine)
    return None if text is None else f"the engine had {text}"


def described(model: Any) -> str:
    """A model's class, name and size."""
    config = model.config.get_text_config(decoder=True)
    of = getattr(model.config, "_name_or_path", "")
    sizes = f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}"
    return f"{type(model).__name__} ({f'{of}, ' if of else ''}{sizes})"


def _changed(before: Any, after: Any) -> str | None:
    """Describes the first setting that differs, with both values; None if all are equal."""
    if not is_dataclass(before) or type(before) is not type(after):
        return None if before == after else f"{shown(before)} when it was made, and has {shown(after)} now"
    for field in fields(before):
        values = getattr(before, field.name), getattr(after, field.name)
        if values[0] != values[1]:
            return f"{field.name} {shown(values[0])} when it was made, and has {shown(values[1])} now"
    return None
