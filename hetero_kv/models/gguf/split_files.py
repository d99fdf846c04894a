"""Finds and checks the parts of a GGUF model that is split into several files.

llama.cpp names them `NAME-00001-of-00003.gguf`. The first has the metadata; each has `split.no` (from 0),
`split.count` and `split.tensors.count`, the number of tensors in all parts. Source: `tools/gguf-split` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.header import MalformedHeaderError, MetadataValue
from hetero_kv.models.gguf.model_files import PART_NAME

if TYPE_CHECKING:
    from hetero_kv.models.gguf.file import GGUFFile

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"


def part_count(metadata: Mapping[str, MetadataValue]) -> int:
    """The number of the model's parts; 1 if it is not split."""
    entry = metadata.get(COUNT)
    return 1 if entry is None else max(int(entry.value), 1)


def part_paths(part: GGUFFile) -> list[Path]:
    """The paths of all parts of the model that `part` belongs to, in order.

    Raises ModelError if the file's name does not say which part it is, contradicts its metadata, or a part is missing.
    """
    count = part_count(part.metadata)
    number = part.get(NUMBER)
    which = "one" if number is None else f"part {number + 1}"
    match = PART_NAME.fullmatch(part.path.name)
    if match is None:
        raise ModelError(
            f"{str(part.path)!r} is {which} of the {count} parts of a split model, and the others cannot be found by "
            f"its name; give it the name of its download, which ends in -{(number or 0) + 1:05d}-of-{count:05d}.gguf, "
            "and put all parts into one folder"
        )
    if (number, count) != (int(match["number"]) - 1, int(match["count"])):
        raise ModelError(
            f"{str(part.path)!r} is {which} of {count} parts by its metadata, which its name contradicts; download all "
            "parts again"
        )
    before, after = part.path.name[: match.start("number")], part.path.name[match.end("number") :]
    paths = [part.path.with_name(f"{before}{each:05d}{after}") for each in range(1, count + 1)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(
            f"{str(part.path)!r} is {which} of the {count} parts of a split model, and {len(missing)} of them are not "
            f"beside it ({', '.join(missing[:3])}); download them into the same folder"
        )
    return paths


def check_parts(parts: Sequence[GGUFFile]) -> None:
    """Raise ModelError unless the files, in order, are the parts of one model.

    Raises MalformedHeaderError if their tensors are not as many as they say, or one is in two parts.
    """
    first = parts[0]
    for number, part in enumerate(parts):
        if (part.get(NUMBER), part.get(COUNT)) != (number, len(parts)):
            raise ModelError(
                f"{str(part.path)!r} is not part {number + 1} of {len(parts)} by its metadata ({NUMBER} "
                f"{part.get(NUMBER)}, {COUNT} {part.get(COUNT)}); download it again"
            )
        # Only the first part must have the model's metadata.
        differing = [
            key
            for key, value in part.metadata.items()
            if key not in (NUMBER, COUNT) and first.metadata.get(key) != value
        ]
        if differing:
            raise ModelError(
                f"{str(part.path)!r} and {str(first.path)!r} are parts of different models: {differing[0]} is "
                f"{part.get(differing[0])!r} and {first.get(differing[0])!r}; download all parts again"
            )
    names = [tensor.name for part in parts for tensor in part.tensors]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise MalformedHeaderError(f"two of its parts have the tensor {min(twice)!r}")
    stated = first.get(TENSORS)
    if stated is not None and stated != len(names):
        raise MalformedHeaderError(f"its parts have {len(names):,} tensors, and {TENSORS} is {stated:,}")
