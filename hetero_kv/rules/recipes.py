"""Finding rule files: by path, or by name among those that ship with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

PACKAGED_FOLDERS = ("injection_rules", "configs")
"""Recipes of methods, and engine settings for typical machines that extend them."""
DEFAULT_RECIPE = "adaptive"
"""What a command takes that is told no rules."""


def find(name: str, folder: Path) -> Path | None:
    """The file `name`, relative to `folder`; else the packaged file of that name, with or without folder and suffix."""
    try:
        path = folder / Path(name).expanduser()
        if path.is_file():
            return path
    except (OSError, ValueError, RuntimeError):
        # A name that no file can have, a folder that may not be looked into, or the home of nobody.
        pass
    for packaged in _packaged():
        if name in (packaged.name, packaged.stem, display(packaged), display(packaged.with_suffix(""))):
            return packaged
    return None


def names() -> list[str]:
    """The names of the packaged files, as `find` takes them."""
    return [path.stem for path in _packaged()]


def display(path: Path) -> str:
    """A path as messages show it: short where it is packaged or below the working directory."""
    path = path.resolve()
    for name in PACKAGED_FOLDERS:
        if path.parent == _folder(name):
            return f"{name}/{path.name}"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _folder(name: str) -> Path:
    return Path(str(resources.files(name))).resolve()


def _packaged() -> list[Path]:
    return [path for name in PACKAGED_FOLDERS for path in sorted(_folder(name).glob("*.yaml"))]
