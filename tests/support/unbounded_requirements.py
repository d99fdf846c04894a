"""Prints the package's and the tests' requirements without version bounds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("documents", "plots", "eval", "test")


def unbounded(requirement: str) -> str:
    """A requirement without its versions; what is said of systems stays."""
    name, semicolon, systems = requirement.partition(";")
    return re.sub(r"[<>=!~].*", "", name).strip() + semicolon + systems


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])):
        print(unbounded(requirement))


if __name__ == "__main__":
    main()
