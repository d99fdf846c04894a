"""`docs/configuration.md` is complete and agrees with the dataclasses."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_kv.cli import COMMANDS
from hetero_kv.commands.configuration_docs import configuration_page
from hetero_kv.rules.owners import every_settings_class
from hetero_kv.rules.registered import operator_classes, registered
from hetero_kv.settings.description import describe

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


@pytest.fixture(scope="module")
def generated():
    """The page as it would be written now, which takes a moment."""
    return configuration_page()


def test_the_page_agrees_with_the_dataclasses(generated):
    assert PAGE.read_text(encoding="utf-8") == generated, "docs/configuration.md is stale: run `make docs`"


@pytest.mark.parametrize("cls", every_settings_class())
def test_every_setting_has_a_line_with_its_type_default_and_meaning(generated, cls):
    for row in describe(cls):
        lines = [line for line in generated.splitlines() if line.startswith(f"| `{row.name}` |")]
        default = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
        parts = [part.replace("|", "\\|") for part in (row.type, f"`{default}`" if default else "", row.doc)]
        assert any(all(part in line for part in parts) for line in lines), row.name


@pytest.mark.parametrize("cls", every_settings_class())
def test_every_alias_and_every_former_name_has_a_line_with_todays_name(generated, cls):
    for row in describe(cls):
        for other in (*row.aliases, *row.formerly):
            assert f"| `{other}` | `{row.name}` |" in generated


def test_every_operator_stands_with_the_settings_that_it_takes(generated):
    for name in operator_classes():
        assert f"`{name}`" in generated
    assert "Applies to `RetrievalAttention`" in generated


def test_everything_registered_and_every_command_stands_in_it(generated):
    for entries in registered().values():
        for entry in entries:
            assert f"| `{entry.name}` | {entry.meaning} |" in generated
    for name in COMMANDS:
        assert f"### {name}\n" in generated


def test_every_line_of_a_table_has_as_many_cells_as_its_heading(generated):
    for part in generated.split("\n\n"):
        lines = [line.replace("\\|", "") for line in part.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
