"""Links between the documents lead to files and headings that exist, and the glossary stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "results" / "README.md"])
LONGEST_GLOSSARY = 60


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link to one of the page's headings ends with, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        other = page.parent / name if name else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    assert broken == []


def test_the_changelog_has_at_most_sixty_entries_of_two_lines():
    entries = (ROOT / "CHANGELOG.md").read_text().split("\n- ")[1:]
    assert len(entries) <= 60
    # A blank line ends the last entry of a section.
    assert all(len(entry.split("\n\n")[0].splitlines()) <= 2 for entry in entries)


def test_the_architecture_has_at_most_four_thousand_words():
    assert len((ROOT / "docs" / "architecture.md").read_text().split()) <= 4000


def test_the_glossary_has_at_most_sixty_terms_and_none_twice():
    rows = re.findall(r"^\| (?!term )(.+?) \|", prose(ROOT / "docs" / "glossary.md"), flags=re.MULTILINE)
    assert 0 < len(rows) <= LONGEST_GLOSSARY
    assert len(rows) == len(set(rows))
