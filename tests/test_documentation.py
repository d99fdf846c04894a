"""What the pages say about the source is true: file names, quotations, and the order of layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.engine.layer import FamilyLayer

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "docs/glossary.md",
    "docs/architecture.md",
    "docs/adding_a_method.md",
    "docs/cuda.md",
    "docs/gguf_files.md",
    "docs/methods.md",
)
#: Where a page's short paths may begin: `engine/step.py` is `hetero_kv/engine/step.py`.
BEGINNINGS = (ROOT, ROOT / "hetero_kv", ROOT / "injection_rules")
#: Files that the pages let their reader write.
THE_READERS_OWN = {"my_rules.yaml", "my_notes.txt", "injection_rules/NAME.yaml"}

#: The packages from the ground up. Those of one line do not import each other, nor those of later lines.
FLOORS = (
    (
        "hetero_kv.cache_home",
        "hetero_kv.cpu_ops",
        "hetero_kv.control_groups",
        "hetero_kv.durable_file",
        "hetero_kv.ending",
        "hetero_kv.errors",
        "hetero_kv.file_states",
        "hetero_kv.malloc_tuning",
        "hetero_kv.printing",
    ),
    ("hetero_kv.cpus", "hetero_kv.gpu_ops", "hetero_kv.text_decoding", "hetero_kv.threads"),
    ("hetero_kv.documents", "hetero_kv.settings", "hetero_kv.store", "hetero_kv.weights"),
    ("hetero_kv.models",),
    ("hetero_kv.engine", "hetero_kv.start_up"),
    ("hetero_kv.adapter",),
    ("hetero_kv.families",),
    ("hetero_kv.operators",),
    ("hetero_kv.contexts", "hetero_kv.planning"),
    ("hetero_kv.rules",),
    ("hetero_kv.loading",),
    ("hetero_kv.serving",),
    ("hetero_kv.cli", "hetero_kv.evals"),
    ("hetero_kv.chat", "hetero_kv.commands", "hetero_kv.server", "hetero_kv.__main__"),
)
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}


def named_files(page: str) -> set[str]:
    """What looks like a file or a folder in a page's words in code style, and what it links to."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = re.findall(r"[\w./-]*\w\.(?:py|yaml|md|svg)\b|[\w./-]+/(?=\s|$)", quoted)
    return {*named, *re.findall(r"\]\(([\w./-]+)[)#]", text)} - THE_READERS_OWN


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
    beginnings = (*BEGINNINGS, (ROOT / page).parent)
    missing = [name for name in named_files(page) if not any((start / name).exists() for start in beginnings)]
    assert missing == []


def unindented(text: str) -> str:
    """The lines of a text, without indentation and blank lines, which a quotation may have otherwise."""
    return "\n".join(stripped for line in text.splitlines() if (stripped := line.strip()))


def test_the_walk_through_quotes_the_example_and_its_rules():
    page = (ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
    for language, name in (("python", "dilated_attention.py"), ("yaml", "dilated.yaml")):
        source = (ROOT / "docs" / "examples" / name).read_text(encoding="utf-8")
        quoted = re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)
        assert quoted
        for block in quoted:
            assert unindented(block) in unindented(source), block


def test_the_documented_methods_of_families_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## What a family answers")[2]
    for heading, cls in (("an operator has", AttentionOperator), ("a cache layer has", FamilyLayer)):
        table = page.partition(f"| {heading} |")[2].partition("\n\n")[0]
        names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1])]
        assert len(names) > 10
        assert [name for name in names if not hasattr(cls, name)] == []


def package_of(module: str) -> str | None:
    """The package that a module belongs to; None for what is not ours."""
    parts = module.split(".")
    return next((name for name in (".".join(parts[:2]), parts[0]) if name in FLOOR), None)


def imported(path: Path) -> Iterator[str]:
    """The modules that a source file imports when it runs: not for the type checker alone."""
    for_types = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            for_types |= {id(inner) for inner in ast.walk(node)}
        elif id(node) in for_types:
            continue
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_downwards():
    upwards = set()
    for package in ("cpu_ops", "gpu_ops", "hetero_kv"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            own = package_of(".".join(parts if package == "hetero_kv" else ("hetero_kv", *parts)))
            for module in imported(path):
                other = package_of(module)
                if own and other and own != other and FLOOR[other] >= FLOOR[own]:
                    upwards.add((path.relative_to(ROOT).as_posix(), module))
    assert upwards == set()


def test_every_package_has_a_floor():
    folders = {f"hetero_kv.{path.parent.name}" for path in (ROOT / "hetero_kv").glob("*/__init__.py")}
    files = {f"hetero_kv.{path.stem}" for path in (ROOT / "hetero_kv").glob("*.py")} - {"hetero_kv.__init__"}
    assert {*FLOOR} == folders | files
