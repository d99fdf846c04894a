"""Finds rule files by path, or by name among those that ship with the package."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

PACKAGED_FOLDERS = ("injection_rules", "configs")
"""Recipes of methods, and files that extend them with engine settings for typical machines."""
DEFAULT_RECIPE = "adaptive"
"""The recipe of a command without `--config`."""


def find(name: str, folder: Path) -> Path | None:
    """The file `name`, relative to `folder`; else the packaged file of that name, with or without folder and suffix."""
    try:
        path = folder / Path(name).expanduser()
        if path.is_file():
            return path
    except (OSError, ValueError, RuntimeError):
        # An invalid file name, a folder without permission, or the home of an unknown user.
        pass
    for packaged in _packaged():
        if name in (packaged.name, packaged.stem, display(packaged), display(packaged.with_suffix(""))):
            return packaged
    return None


def names() -> list[str]:
    """The names of the packaged files, as `find` takes them."""
    return [path.stem for path in _packaged()]


def display(path: Path) -> str:
    """A path as messages show it: short if it is packaged or below the working directory."""
    path = path.resolve()
    for name in PACKAGED_FOLDERS:
        if path.parent == _folder(name):
            return f"{name}/{path.name}"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@cache
def _folder(name: str) -> Path:
    return Path(str(resources.files("hetero_kv") / name)).resolve()


@cache
def _packaged() -> tuple[Path, ...]:
    return tuple(path for name in PACKAGED_FOLDERS for path in sorted(_folder(name).glob("*.yaml")))
