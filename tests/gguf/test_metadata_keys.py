"""Every key of a file is used, known to be without effect, or refused."""

from __future__ import annotations

import gguf
import pytest

from hetero_kv import load_model
from hetero_kv.models import ModelError
from tests.support.gguf_models.container import Layout, array, scalar
from tests.support.gguf_models.meaning import Base
from tests.support.gguf_models.variants import VARIANTS

#: That with most keys; the others are slow.
QUICK = ("llama: YaRN, all told",)
EVERY = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in VARIANTS
    if name in QUICK or ":" not in name or "linear" in name or "long" in name
]
_KINDS = gguf.GGUFValueType


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        # A length beyond that of the test's texts.
        return value + 1 if value < 32 else 2 * value
    if isinstance(value, float):
        return value * 1.5
    return value + "x" if isinstance(value, str) else value[1:] + value[:1]


def encoded(types, value):
    """A value as a header has it."""
    return array(types[-1], value) if types[0] == _KINDS.ARRAY else scalar(types[0], value)


def entries(path):
    """(key, types, value) of all metadata."""
    for key, entry in gguf.GGUFReader(path).fields.items():
        if not key.startswith("GGUF."):
            yield key, entry.types, entry.contents()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("gone", [False, True], ids=["another value", "no value"])
def test_a_key_with_another_value_or_none_is_computed_with_or_refused(written, tmp_path, name, gone):
    file = written(name)
    base, layout = Base(file.original), Layout.of(file.path)
    faults = {}
    for place, (key, types, value) in enumerate(entries(file.path)):
        changed = layout.copy()
        assert changed.entries[place] == (key, encoded(types, value))
        changed_value = None if gone else other(value)
        changed.entries[place : place + 1] = [] if gone else [(key, encoded(types, changed_value))]
        path = tmp_path / "changed.gguf"
        changed.write(path)
        try:
            model = load_model(path, dtype="float32", device="cpu").model
        except ModelError:
            continue
        if fault := base.wrong(key, changed_value, model):
            faults[key, repr(changed_value)] = fault
    assert faults == {}


def test_an_unknown_key_is_refused_by_name(written, tmp_path):
    layout = Layout.of(written("llama").path)
    layout.entries.append(("llama.attention.made_up", scalar(4, 3)))
    layout.write(tmp_path / "more.gguf")
    with pytest.raises(ModelError, match=r"llama\.attention\.made_up 3"):
        load_model(tmp_path / "more.gguf")


def test_a_tensor_without_a_place_is_refused_by_name(written, tmp_path):
    layout = Layout.of(written("llama").path)
    more = layout.copy().tensors[1]
    end = layout.tensors[-1]
    more.name = "blk.0.attn_gate.weight"
    more.offset = end.offset + -(-len(end.data) // 32) * 32
    layout.tensors.append(more)
    layout.write(tmp_path / "more.gguf")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_gate\.weight"):
        load_model(tmp_path / "more.gguf")
