"""GGUF files of every architecture with one wrong key, value or tensor."""

from __future__ import annotations

import math
import random as random_numbers
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers.utils import logging

from hetero_kv import HeteroCache, inject, load_model, open_model
from tests.campaigns.campaign import Campaign, WrongResultError
from tests.support.gguf_models.container import ARRAY, FORMS, STRING, Layout, Tensor, array, scalar
from tests.support.gguf_models.conversion import write
from tests.support.gguf_models.meaning import IDS, Base
from tests.support.gguf_models.variants import VARIANTS, tiny_model, vocabulary_of

Random = random_numbers.Random
BOOL, FLOAT32, UINT32 = 7, 6, 4
INTEGERS = (0, 1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 63, 64, 65, 96, 100, 128, 255, 512, 10_000, 65_536, (1 << 32) - 1)
FLOATS = (0.0, -1.0, 1e-6, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 30.0, 50.0, 1e4, 1e6, 1e30, math.inf, math.nan)
TEXTS = ("", "none", "linear", "yarn", "longrope", "model", "adapter", "llama", "gpt2", "default", "x" * 300)
#: Of other architectures too: whatever the gguf package knows.
SUFFIXES = sorted(
    value.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for value in vars(group).values()
    if isinstance(value, str) and value.startswith("{arch}.")
)
#: That of 27 billion parameters has as many layers as those, and takes as long.
NAMED = [name for name in VARIANTS if "27B" not in name]
WITHOUT_RULES = ("falcon", "bloom", "mamba")
#: Of these, those that llama.cpp computes with where one may least expect it.
SCALES = tuple(suffix for suffix in SUFFIXES if "scal" in suffix or "cap" in suffix or suffix.startswith("rope."))
NAMES = sorted(set(gguf.TENSOR_NAMES.values()))


@dataclass(frozen=True)
class Whole:
    """A sound file, taken apart, and the model that it was written from."""

    layout: Layout
    base: Base
    rules: bool


@dataclass(frozen=True)
class Edit:
    """What was changed: the key and its new value, None where it is gone; or a tensor."""

    key: str = ""
    value: Any = None
    tensor: str = ""


def prepare(folder: Path) -> Callable[[str], Whole]:
    """Variant -> its file, written when it is first needed."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)

    @cache
    def whole(name: str) -> Whole:
        model = tiny_model(name)
        path = write(folder / "whole.gguf", model, vocabulary_of(VARIANTS[name][0]))
        return Whole(Layout.of(path), Base(model), name.partition(":")[0] not in WITHOUT_RULES)

    return whole


def attempt(whole_of: Callable[[str], Whole], random: Random, folder: Path) -> None:
    """Change one thing, load the file in one of the ways, and compare the logits with what it says now."""
    whole = whole_of(random.choice(NAMED))
    layout = whole.layout.copy()
    edit = random.choice(EDITS)(layout, whole.base, random)
    path = folder / "changed.gguf"
    layout.write(path)
    way = random.random()
    if way < 0.6 or not whole.rules:
        model = load_model(path, dtype="float32", device="cpu", progress=_silent).model
    else:
        opened = open_model(path, dtype="float32", device="cpu", progress=_silent)
        if way > 0.8:
            inject(opened.model, "dense", command_line={"max_seq_len": 64, "kv_type": "FP32"})
        model = opened.load().model
    injected = getattr(model, "hetero_kv_injection", None) is not None
    run = (lambda ids: model(ids, past_key_values=HeteroCache(model))) if injected else model
    if edit.tensor:
        _check_tensor(whole.base, edit, run)
    elif fault := whole.base.wrong(edit.key, edit.value, run):
        raise WrongResultError(f"{whole.base.architecture}: {edit.key} {edit.value!r} {fault}")


def _silent(activity: str, done: int, total: int) -> None:
    pass


def _check_tensor(base: Base, edit: Edit, model: Any) -> None:
    with torch.inference_mode():
        found = model(IDS).logits
    if float((found - base.logits).abs().max() / base.logits.std()) < 1e-3:
        raise WrongResultError(f"{base.architecture}: tensor {edit.tensor} is passed over")


def change_value(layout: Layout, base: Base, random: Random) -> Edit:
    """A key of the model has another value of its type."""
    place = random.choice(list(_of_the_model(layout, base)))
    key, old = layout.entries[place]
    kind = struct.unpack_from("<I", old)[0]
    if kind == ARRAY:
        encoded, value = _array(random)
    elif kind == STRING or random.random() < 0.3:
        encoded, value = _value(kind, random)
    else:
        encoded, value = _near(kind, struct.unpack_from("<" + FORMS[kind], old, 4)[0], random)
    layout.entries[place] = (key, encoded)
    return Edit(key, value)


def change_type(layout: Layout, base: Base, random: Random) -> Edit:
    """A key has any value of any type."""
    place = random.randrange(1, len(layout.entries))
    key = layout.entries[place][0]
    encoded, value = _any(random)
    layout.entries[place] = (key, encoded)
    return Edit(key, value)


def drop_key(layout: Layout, base: Base, random: Random) -> Edit:
    """A key is gone."""
    return Edit(layout.entries.pop(random.randrange(1, len(layout.entries)))[0])


def add_key(layout: Layout, base: Base, random: Random) -> Edit:
    """A key is there that some architecture has."""
    key = f"{base.architecture}.{random.choice(random.choice((SUFFIXES, SCALES)))}"
    if key in dict(layout.entries):
        return change_value(layout, base, random)
    usual = (BOOL, FLOAT32, UINT32, FLOAT32, UINT32)
    encoded, value = _any(random) if random.random() < 0.3 else _value(random.choice(usual), random)
    layout.entries.append((key, encoded))
    return Edit(key, value)


def add_unknown_key(layout: Layout, base: Base, random: Random) -> Edit:
    """A key is there that nobody knows."""
    key = random.choice(("attention.made_up", "rope.made_up", "x", "attention.head_count.x", "expert_made_up"))
    encoded, value = _any(random)
    layout.entries.append((f"{random.choice((base.architecture, 'made_up'))}.{key}", encoded))
    return Edit(layout.entries[-1][0], value if value not in (0, "", []) else "made up")


def add_tensor(layout: Layout, base: Base, random: Random) -> Edit:
    """A tensor is there that the model does not have, of a name that some model has."""
    present = {tensor.name for tensor in layout.tensors}
    kind = random.choice((".weight", ".weight", ".bias", ".scale"))
    name = random.choice(NAMES).format(bid=random.randrange(3), xid=0) + kind
    if random.random() < 0.3:
        name = random.choice(sorted(present)).removesuffix(".weight").removesuffix(".bias") + kind
    if name in present or "{" in name:
        return drop_tensor(layout, base, random)
    dims = random.choice(layout.tensors).dims if random.random() < 0.5 else [random.choice((1, 4, 8, 16, 64))]
    numbers = np.random.default_rng(random.randrange(1 << 30)).normal(1, 0.5, dims[::-1]).astype(np.float32)
    layout.tensors.append(Tensor(name, [*dims], 0, 0, bytearray(numbers.tobytes())))
    _placed(layout)
    return Edit(tensor=name)


def drop_tensor(layout: Layout, base: Base, random: Random) -> Edit:
    """A tensor is gone."""
    tensor = layout.tensors.pop(random.randrange(len(layout.tensors)))
    _placed(layout)
    return Edit(tensor=tensor.name)


EDITS = (change_value, change_value, change_value, change_type, drop_key, add_key, add_key, add_unknown_key, add_tensor,
         drop_tensor)  # fmt: skip


def _of_the_model(layout: Layout, base: Base) -> Iterator[int]:
    return (place for place, (key, _) in enumerate(layout.entries) if key.startswith(f"{base.architecture}."))


def _placed(layout: Layout) -> None:
    end = 0
    for tensor in layout.tensors:
        tensor.offset = end
        end += -(-len(tensor.data) // 32) * 32


def _any(random: Random) -> tuple[bytes, Any]:
    kind = random.choice((*FORMS, STRING, ARRAY))
    return _array(random) if kind == ARRAY else _value(kind, random)


def _value(kind: int, random: Random) -> tuple[bytes, Any]:
    if kind == STRING:
        value: Any = random.choice(TEXTS)
    elif FORMS[kind] in "fd":
        value = random.choice(FLOATS)
    elif FORMS[kind] == "?":
        value = random.random() < 0.5
    else:
        value = random.choice(INTEGERS) % (1 << 8 * struct.calcsize(FORMS[kind]) - 1)
    return scalar(kind, value), value


def _near(kind: int, old: Any, random: Random) -> tuple[bytes, Any]:
    if FORMS[kind] == "?":
        value: Any = not old
    elif FORMS[kind] in "fd":
        # As the header has it, and no other.
        value = float(np.float32(old * random.choice((0.5, 0.8, 1.25, 2.0, 10.0))))
    else:
        value = max(0, random.choice((old - 1, old + 1, old * 2, old // 2)))
    return scalar(kind, value), value


def _array(random: Random) -> tuple[bytes, Any]:
    length = random.choice((0, 1, 3, 4, 7))
    kind = random.choice((STRING, BOOL, FLOAT32, UINT32))
    choices: dict[int, tuple[Any, ...]] = {STRING: TEXTS, BOOL: (False, True), FLOAT32: FLOATS, UINT32: INTEGERS}
    values = [random.choice(choices[kind]) for _ in range(length)]
    return array(kind, values), values


CAMPAIGNS = (Campaign("GGUF metadata", 50, prepare, attempt),)
