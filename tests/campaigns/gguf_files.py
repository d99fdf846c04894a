"""Damaged GGUF files: header, metadata, offsets, numbers, templates."""

from __future__ import annotations

import math
import random as random_numbers
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import torch

from hetero_kv import inject, load_model, open_model
from tests.campaigns.campaign import Campaign, WrongResultError
from tests.support.gguf_models.container import ARRAY, FORMS, STRING, Layout, array, scalar
from tests.support.tiny_qwen2 import GGUF_NAMES, tiny_qwen2, write_gguf

Random = random_numbers.Random
TEMPLATES = (
    "{{ 1 / 0 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**9 }}", "{{ 'a' * 10**15 }}",
    "{{ 'a'.center(10**10) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% if %}", "{{", "\x00",
    "{{ ''.__class__.__mro__ }}", "{{ messages.foo.bar }}", "{% include '/etc/passwd' %}", "{{ '%0999999999d' % 1 }}",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "{{ raise_exception('no') }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% set x = 'aaaaaaaaaaaaaaaa' %}" + "{% set x = x ~ x %}" * 40, "{{" + "(" * 3000 + ")" * 3000 + "}}",
)  # fmt: skip
#: These use the time that a template has, so that the suite tries one of them alone.
SLOW_TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
)
INTEGERS = (0, 1, 2, 3, 7, 31, 33, 255, 4096, 65_535, 65_536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40,
            (1 << 63) - 1, (1 << 64) - 1)  # fmt: skip
FLOATS = (0.0, -1.0, 1e-30, 1.0, 1e30, math.inf, -math.inf, math.nan)
NOT_FINITE = (0x7C00, 0xFC00, 0x7E00, 0x7C01)


class Base(NamedTuple):
    """A sound file, taken apart, and the numbers that it gives to each parameter."""

    layout: Layout
    parameters: dict[str, torch.Tensor]


def prepare(folder: Path) -> list[Base]:
    """The tiny model in numbers and in blocks."""
    bases = []
    for kind in (None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1):
        path = write_gguf(folder / f"{kind}.gguf", tiny_qwen2(), kind=kind)
        # What transformers itself reads from the sound file.
        model = load_model(path, dtype="float32", device="cpu").model
        bases.append(Base(Layout.of(path), model.state_dict()))
    return bases


def attempt(bases: list[Base], random: Random, folder: Path) -> None:
    """Make one file and load it, in one of the ways."""
    base = random.choice(bases)
    layout = base.layout.copy()
    changed: set[str] = set()
    for _ in range(random.choice((1, 1, 1, 2))):
        changed |= random.choice(CHANGES)(layout, random)
    path = folder / "changed.gguf"
    layout.write(path)
    if random.random() < 0.5:
        model = load_model(path, dtype="float32", device="cpu", progress=_silent).model
    else:
        opened = open_model(path, dtype="float32", device="cpu", progress=_silent)
        if random.random() < 0.3:
            inject(opened.model, "dense", command_line={"max_seq_len": 256, "weights": "fp32"})
        model = opened.load().model
    _check(model, base, changed)


def _silent(activity: str, done: int, total: int) -> None:
    pass


def _check(model, base: Base, changed: set[str]) -> None:
    """All numbers are finite, and those of tensors that were left alone are what they were."""
    may_differ = {_parameter(name) for name in changed}
    for name, numbers in model.state_dict().items():
        plain = name.replace(".wrapped.", ".")
        if not torch.isfinite(numbers).all():
            raise WrongResultError(f"{plain} has numbers that are not finite")
        known = base.parameters.get(plain)
        if known is None or known.shape != numbers.shape:
            raise WrongResultError(f"{plain} is {list(numbers.shape)}")
        if plain not in may_differ and not torch.equal(known, numbers):
            raise WrongResultError(f"{plain} has other numbers, and {sorted(changed)} were changed")


def _parameter(name: str) -> str:
    for theirs, ours in sorted(GGUF_NAMES.items(), key=lambda pair: -len(pair[1])):
        name = name.replace(ours, theirs)
    return name


def flip_header(layout: Layout, random: Random) -> set[str]:
    """A few bytes of the header are others."""
    size = len(layout.header())
    layout.flips += [(random.randrange(size), random.randrange(256)) for _ in range(random.choice((1, 1, 2, 8)))]
    return set()


def flip_tensor_header(layout: Layout, random: Random) -> set[str]:
    """A byte of what is said of the tensors is another."""
    size = len(layout.header())
    described = sum(len(tensor.described()) for tensor in layout.tensors)
    layout.flips.append((size - random.randrange(1, described), random.choice((0, 1, 2, 128, 255))))
    return set()


def cut(layout: Layout, random: Random) -> set[str]:
    """The file ends early, or has more behind it."""
    size = len(layout.header()) + sum(len(tensor.data) for tensor in layout.tensors)
    layout.length = random.choice((random.randrange(size), size - random.randrange(200), size + random.randrange(5000)))
    return set()


def change_count(layout: Layout, random: Random) -> set[str]:
    """It says that it has more or fewer of something."""
    what = random.choice(("tensors", "entries", "version"))
    near = {"tensors": len(layout.tensors), "entries": len(layout.entries), "version": 3}[what]
    layout.counts[what] = random.choice((near - 1, near + 1, near + 1000, 0, (1 << 32) - 1))
    return set()


def drop_key(layout: Layout, random: Random) -> set[str]:
    """A key is missing."""
    layout.entries.pop(random.randrange(len(layout.entries)))
    return set()


def repeat_key(layout: Layout, random: Random) -> set[str]:
    """A key is there twice."""
    layout.entries.append(random.choice(layout.entries))
    return set()


def change_value(layout: Layout, random: Random) -> set[str]:
    """A key has another value, of the same or another type."""
    place = random.randrange(len(layout.entries))
    layout.entries[place] = (layout.entries[place][0], _any_value(random))
    return set()


def add_known_key(layout: Layout, random: Random) -> set[str]:
    """A key that means something has any value."""
    key = random.choice(
        ("general.alignment", "split.count", "qwen2.vocab_size", "qwen2.rope.scaling.type", "qwen2.rope.scaling.factor",
         "qwen2.rope.dimension_count", "qwen2.attention.key_length", "qwen2.expert_count", "general.name",
         "qwen2.attention.sliding_window", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.scores",
         "tokenizer.ggml.add_bos_token", "tokenizer.ggml.unknown_token_id", "general.file_type")
    )  # fmt: skip
    layout.entries.append((key, _any_value(random)))
    return set()


def set_number(layout: Layout, random: Random) -> set[str]:
    """A number is another one of its type."""
    numbers = [place for place, (_, value) in enumerate(layout.entries) if _type(value) in FORMS]
    place = random.choice(numbers)
    key, value = layout.entries[place]
    layout.entries[place] = (key, _number(_type(value), random))
    return set()


def change_dimensions(layout: Layout, random: Random) -> set[str]:
    """A tensor has other dimensions."""
    tensor = random.choice(layout.tensors)
    way = random.randrange(5)
    if way == 0:
        tensor.dims.reverse()
    elif way == 1:
        tensor.dims[random.randrange(len(tensor.dims))] = random.choice(INTEGERS)
    elif way == 2:
        tensor.dims = [1] * random.choice((0, 5, 65, 4000))
    elif way == 3:
        tensor.count = random.choice((0, 1, 3, 5, 65, (1 << 32) - 1))
    else:
        tensor.dims = [tensor.dims[0] * 2, *(length // 2 for length in tensor.dims[1:])]
    return set()


def change_type(layout: Layout, random: Random) -> set[str]:
    """A tensor is said to be of another type."""
    random.choice(layout.tensors).kind = random.choice((*range(50), 1 << 31))
    return set()


def change_offset(layout: Layout, random: Random) -> set[str]:
    """A tensor begins elsewhere."""
    tensor = random.choice(layout.tensors)
    other = random.choice(layout.tensors).offset
    steps = (1, 16, 32, 64, -1, -32, 4096)
    tensor.offset = random.choice((other, tensor.offset + random.choice(steps), *INTEGERS)) % (1 << 64)
    return set()


def swap_tensors(layout: Layout, random: Random) -> set[str]:
    """Two tensors begin each where the other does."""
    one, other = random.sample(layout.tensors, 2)
    one.offset, other.offset = other.offset, one.offset
    return set()


def repeat_tensor(layout: Layout, random: Random) -> set[str]:
    """A tensor occurs twice, by its own name or by another tensor's."""
    tensor = random.choice(layout.tensors)
    if random.random() < 0.5:
        layout.tensors.append(tensor)
    else:
        tensor.name = random.choice(layout.tensors).name
        return {tensor.name} if len({tensor.name for tensor in layout.tensors}) == len(layout.tensors) else set()
    return set()


def drop_tensor(layout: Layout, random: Random) -> set[str]:
    """What is said of a tensor is missing."""
    dropped = layout.tensors.pop(random.randrange(len(layout.tensors)))
    return {dropped.name}


def rename_tensor(layout: Layout, random: Random) -> set[str]:
    """A tensor has a name that is no model's."""
    tensor = random.choice(layout.tensors)
    tensor.name = random.choice((tensor.name + "x", "", "x" * 100, "blk.99999999.attn_q.weight", "\x1b[31m", "blk.0"))
    return set()


def spoil_scale(layout: Layout, random: Random) -> set[str]:
    """A scale, or a number, is infinite or none."""
    tensor = random.choice(layout.tensors)
    quantization = gguf.GGMLQuantizationType(tensor.kind)
    _, size = gguf.GGML_QUANT_SIZES[quantization]
    start = random.randrange(len(tensor.data) // size) * size
    if quantization is gguf.GGMLQuantizationType.F32:
        tensor.data[start : start + 4] = struct.pack("<f", random.choice(FLOATS[-3:]))
    else:
        tensor.data[start : start + 2] = struct.pack("<H", random.choice(NOT_FINITE))
    return {tensor.name}


def flip_data(layout: Layout, random: Random) -> set[str]:
    """Some bytes of a tensor are others."""
    tensor = random.choice(layout.tensors)
    for _ in range(random.choice((1, 10))):
        tensor.data[random.randrange(len(tensor.data))] = random.randrange(256)
    return {tensor.name}


def change_template(layout: Layout, random: Random) -> set[str]:
    """The chat template is hostile."""
    templates = SLOW_TEMPLATES if random.random() < 0.03 else TEMPLATES
    _set(layout, "tokenizer.chat_template", scalar(STRING, random.choice(templates)))
    return set()


def change_vocabulary(layout: Layout, random: Random) -> set[str]:
    """Tokens and what belongs to them are not what a tokenizer needs."""
    key, value = random.choice(
        (
            ("tokens", array(STRING, [b"a"] * 260)),
            ("tokens", array(STRING, [b"\xff\xfe", b"a"] * 130)),
            ("tokens", array(STRING, [])),
            ("tokens", array(4, range(260))),
            ("merges", array(STRING, ["he", "nothing here", ""])),
            ("merges", array(STRING, [f"{i} {i}" for i in range(1000)])),
            ("token_type", array(5, [1] * 3)),
            ("token_type", array(5, [-7] * 260)),
            ("scores", array(6, [math.nan] * 260)),
            ("model", scalar(STRING, random.choice(("llama", "t5", "bert", "none", "")))),
            ("eos_token_id", scalar(4, random.choice(INTEGERS[:15]))),
            ("pre", scalar(STRING, "\x1b]0;owned\x07")),
        )
    )
    _set(layout, f"tokenizer.ggml.{key}", value)
    return set()


def add_large_array(layout: Layout, random: Random) -> set[str]:
    """An array that is long, nested, or not there."""
    way = random.randrange(4)
    long = {
        0: lambda: struct.pack("<IIQ", ARRAY, 0, 1 << 21) + bytes(1 << 21),
        1: lambda: struct.pack("<IIQ", ARRAY, 0, 1 << 20) + bytes(1 << 20),
        2: lambda: struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQ", ARRAY, 1) * 10_000,
        3: lambda: struct.pack("<IIQ", ARRAY, random.choice((STRING, 4)), random.choice(INTEGERS)),
    }
    layout.entries.append(("general.notes", long[way]()))
    return set()


CHANGES: tuple[Callable[[Layout, Random], set[str]], ...] = (
    flip_header, flip_header, flip_tensor_header, cut, change_count, drop_key, repeat_key, change_value, add_known_key,
    add_known_key, set_number, set_number, change_dimensions, change_type, change_offset, swap_tensors, repeat_tensor,
    drop_tensor, rename_tensor, spoil_scale, flip_data, change_template, change_vocabulary, add_large_array,
)  # fmt: skip


def _type(value: bytes) -> int:
    return struct.unpack_from("<I", value)[0]


def _set(layout: Layout, key: str, value: bytes) -> None:
    layout.entries = [(name, old) for name, old in layout.entries if name != key] + [(key, value)]


def _number(kind: int, random: Random) -> bytes:
    if FORMS[kind] in "fd":
        return scalar(kind, random.choice(FLOATS))
    if FORMS[kind] == "?":
        return struct.pack("<IB", kind, random.randrange(256))
    bits = 8 * struct.calcsize(FORMS[kind])
    value = random.choice(INTEGERS) % (1 << bits)
    return scalar(kind, value if FORMS[kind].isupper() else value - (1 << (bits - 1)))


def _any_value(random: Random) -> bytes:
    way = random.randrange(5)
    if way < 3:
        return _number(random.choice(list(FORMS)), random)
    if way == 3:
        return scalar(
            STRING, random.choice(("", "none", "linear", "yarn", "qwen2", "0", "a" * 5000, "\x1b[2J", b"\xff"))
        )
    return random.choice((array(4, [1, 2, 3]), array(STRING, ["a"]), array(6, [math.nan]), array(4, []), b"\x63\0\0\0"))


CAMPAIGNS = (Campaign("GGUF files", 200, prepare, attempt),)
