"""transformers' lists of classes are read from the disk while nothing that they come from has changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero_kv.models.packed_folder import packed_home
from hetero_kv.start_up.class_lists import FILE, keep_class_lists


class Library:
    """A library's folder, with a module that lists the classes of its models."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "models"
        self.reads: list[Path] = []
        (folder / "utils").mkdir(parents=True)
        (folder / "utils" / "import_utils.py").touch()
        for path in ("__init__.py", "llama/__init__.py", "llama/modeling_llama.py"):
            (self.models / path).parent.mkdir(parents=True, exist_ok=True)
            (self.models / path).write_text("text")

    def lists(self, path: str = "") -> object:
        """What a new process gets for a path in the folder of models."""

        def read(folder: Path) -> object:
            self.reads.append(folder)
            return {"llama": {frozenset({"torch"}): {"modeling_llama": {"LlamaModel"}}}}

        code = self.models.parent / "utils" / "import_utils.py"
        module = SimpleNamespace(__file__=str(code), create_import_structure_from_path=read)
        keep_class_lists(module)
        first, second = (module.create_import_structure_from_path(self.models / path) for _ in range(2))
        assert first == second
        assert first is not second
        return first


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "home"))
    return Library(tmp_path / "transformers")


def kept() -> list[Path]:
    return list(packed_home().rglob(FILE))


def test_they_are_read_once_for_all_processes(library: Library):
    first = library.lists()
    assert (
        library.lists("__init__.py") == first == {"llama": {frozenset({"torch"}): {"modeling_llama": {"LlamaModel"}}}}
    )
    assert library.reads == [library.models]


def test_those_of_one_model_are_not_kept(library: Library):
    library.lists("llama")
    assert library.reads == [library.models / "llama"] * 2
    assert kept() == []


@pytest.mark.parametrize("change", ["models/llama/modeling_llama.py", "utils/import_utils.py", "models/qwen2/new.py"])
def test_a_change_of_what_they_come_from_makes_new_ones(library: Library, change: str):
    library.lists()
    changed = library.models.parent / change
    changed.parent.mkdir(exist_ok=True)
    changed.write_text("other text")
    library.lists()
    assert library.reads == [library.models] * 2
    assert len(kept()) == 2


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:40] + b"x" + content[41:]])
def test_a_damaged_file_is_made_again(library: Library, damage):
    first = library.lists()
    (path,) = kept()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert library.lists() == first
    assert library.reads == [library.models] * 2
    assert path.read_bytes() == whole


def test_where_nothing_can_be_written_they_are_made_at_every_start(library: Library, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "file"))
    library.lists()
    library.lists()
    assert library.reads == [library.models] * 2
