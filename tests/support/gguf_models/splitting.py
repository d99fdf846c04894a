"""Splits a GGUF file into parts, as llama.cpp's `gguf-split` does."""

from __future__ import annotations

from pathlib import Path

from tests.support.gguf_models.container import Layout, padded, scalar

U16, I32 = 2, 5


def part_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def split(path: Path, folder: Path, stem: str, count: int, *, empty_first: bool = False) -> list[Path]:
    """Write the parts, tensors in turn; `empty_first` leaves the first without tensors. Returns their paths."""
    whole = Layout.of(path)
    later = count - empty_first
    groups = [[] for _ in range(count)]
    for number, tensor in enumerate(whole.copy().tensors):
        groups[number % later + empty_first].append(tensor)
    paths = []
    for number, (name, tensors) in enumerate(zip(part_names(stem, count), groups, strict=True)):
        place = 0
        for tensor in tensors:
            tensor.offset = place
            place += len(padded(bytes(tensor.data)))
        entries = [
            ("split.no", scalar(U16, number)),
            ("split.count", scalar(U16, count)),
            ("split.tensors.count", scalar(I32, len(whole.tensors))),
        ]
        Layout((whole.entries if number == 0 else []) + entries, tensors).write(folder / name)
        paths.append(folder / name)
    return paths
