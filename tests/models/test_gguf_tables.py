"""The tables of architectures are whole, and the documentation lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero_kv.models.gguf.architectures import ARCHITECTURES


def test_the_documentation_lists_the_architectures_that_have_a_table():
    text = (Path(__file__).parents[2] / "docs" / "gguf_files.md").read_text()
    listed = text[text.index("These have one:") :].split("\n\n")[0]
    assert re.findall(r"`([\w-]+)`", listed) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_key_of_a_table_is_needed_or_optional(name):
    table = ARCHITECTURES[name]
    assert table.optional <= table.keys.keys()
    assert not set(table.without_effect) & set(table.keys)
    assert all(reason for reason in table.without_effect.values())
