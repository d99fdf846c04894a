"""An open context file: its metadata and the places of its blocks, checked before use."""

from __future__ import annotations

import json
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_kv.contexts.block_runs import BLOCKS, BlockRun, contents_in, damage_of, rows_digest
from hetero_kv.contexts.identity import FORMAT, Identity, version
from hetero_kv.contexts.tensor_file import TensorFile
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.engine.resident_prefix import NO_RESIDENT_PREFIX, ResidentPrefix
from hetero_kv.engine.saved_part import SavedPart
from hetero_kv.errors import brief_error, shown

#: The metadata key of a context's description.
KEY = "hetero_kv_context"

_IS_FILE = re.compile(r"|[0-9a-f]{32}\.safetensors")


@dataclass(frozen=True)
class OpenContext:
    """An open context file with a checked header. Other files with blocks of the context are opened on demand.

    Attributes:
        metadata: the metadata of `write_context`.
        identity: the model and settings that it belongs to.
        tokens: token ids of every row; [] if it was saved without them.
    """

    file: TensorFile
    metadata: dict[str, Any]
    identity: Identity
    tokens: list[list[int]]
    _others: dict[str, OpenContext] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> OpenContext:
        """Open the context at `path`.

        Raises:
            ContextError: the file cannot be read, or has another format version.
            DamagedContextError: its content differs from what was written.
        """
        try:
            file = TensorFile(path)
        except OSError as error:
            raise ContextError(f"{path} cannot be read ({brief_error(error)}); give a saved context") from error
        try:
            metadata = _metadata(file)
            file.assign_checksums(lambda name: name.startswith(BLOCKS))
            tokens = [file.tensor(name).tolist() for name in file.entries if name.startswith("tokens/")]
            if not all(isinstance(row, list) for row in tokens):
                raise DamagedContextError(f"{path} has tokens that are not rows of numbers")
            return cls(file, metadata, Identity.read(metadata.get("identity"), str(path)), tokens)
        except BaseException:
            file.close()
            raise

    @property
    def described(self) -> str:
        """The context in messages: its name, or else its length, and its file; the file alone if no store wrote it."""
        notes = self.metadata.get("notes")
        if not isinstance(notes, dict) or "name" not in notes:
            return self.file.where
        if notes["name"] is not None:
            return f"the context {shown(notes['name'], 80)} ({self.file.where})"
        return f"the context of {sum(map(len, self.tokens)):,} tokens without a name ({self.file.where})"

    @property
    def layouts(self) -> int:
        """How many layouts of blocks it has."""
        layouts = self.metadata.get("layouts")
        return len(layouts) if isinstance(layouts, list) else 0

    @property
    def salt(self) -> str:
        """The salt of its addresses; "" for none. Raises DamagedContextError if it is no text."""
        salt = self.metadata.get("salt", "")
        if not isinstance(salt, str):
            raise DamagedContextError(f"{self.file.where} has the salt {shown(salt, 80)}, which is no text")
        return salt

    @property
    def stored_tokens(self) -> list[list[int]]:
        """The token ids of every row up to its stored length. Raises DamagedContextError for invalid lengths."""
        groups = self.metadata.get("cohorts")
        sound = [each for each in groups if isinstance(each, dict)] if isinstance(groups, list) else []
        parts = [SavedPart(numbers=each, where=self.file.where) for each in sound]
        lengths = [
            part.integer("length", 1) for part in parts for _ in range(part.integer("rows", 1, len(self.tokens)))
        ]
        if len(lengths) != len(self.tokens) or any(map(operator.lt, map(len, self.tokens), lengths)):
            raise DamagedContextError(f"{self.file.where} lacks tokens of its rows")
        return [row[:length] for row, length in zip(self.tokens, lengths, strict=True)]

    def resident_prefix(self) -> ResidentPrefix:
        """The resident prefix for the memory plan; `NO_RESIDENT_PREFIX` if the metadata cannot be read."""
        layouts, groups = (self.metadata.get(name) for name in ("layouts", "cohorts"))
        if not isinstance(layouts, list) or not isinstance(groups, list) or not groups:
            return NO_RESIDENT_PREFIX
        try:
            lengths = [
                SavedPart(numbers=each if isinstance(each, dict) else {}, where=self.file.where).integer("length", 1)
                for each in groups
            ]
            return ResidentPrefix(min(lengths), sum(self._mapped_bytes(number) for number in range(len(layouts))))
        except DamagedContextError:
            return NO_RESIDENT_PREFIX

    def _mapped_bytes(self, number: int) -> int:
        """Bytes of a layout's blocks that loading maps instead of copying."""
        mapped = place = 0
        for run in self.runs(number):
            file = self.holder(number, run)
            names = [name for name in file.entries if name.startswith(f"{BLOCKS}{number}/")]
            mapped += sum(file.mapped_bytes(name, run.first, run.count, place) for name in names)
            place += run.count
        return mapped

    def close(self) -> None:
        """Close the file, and the other files with its blocks."""
        self.file.close()
        for other in self._others.values():
            other.close()

    def runs(self, number: int) -> list[BlockRun]:
        """The runs of a layout's blocks, in order. Raises DamagedContextError for an invalid run."""
        recorded = self._layout(number).get("runs")
        runs = []
        for run in recorded if isinstance(recorded, list) else [None]:
            match run:
                case [str() as file, int() as first, int() as count, str() as digest] if (
                    first >= 0 < count and _IS_FILE.fullmatch(file)
                ):
                    runs.append(BlockRun(file, first, count, digest))
                case _:
                    raise DamagedContextError(f"{self.file.where}: a run of blocks is {shown(run, 100)}")
        return runs

    def first_runs(self, number: int, tokens: int | None) -> list[BlockRun]:
        """The runs of a layout with the blocks of the first tokens; None for all."""
        runs = self.runs(number)
        if tokens is None:
            return runs
        blocks, found = -(-tokens // self.layout(number)[0]), list[BlockRun]()
        for run in runs:
            if blocks <= 0:
                break
            found.append(run)
            blocks -= run.count
        return found

    def damage(self) -> list[DamagedContextError]:
        """The damage in the file, and in its blocks in other files; one error per tensor."""
        found = []
        for name in self.file.entries:
            if not name.startswith(BLOCKS):
                try:
                    self.file.tensor(name)
                except DamagedContextError as error:
                    found.append(error)
        for number in range(self.layouts):
            for run in self.runs(number):
                try:
                    found += damage_of(self.holder(number, run), number, run)
                except DamagedContextError as error:
                    found.append(error)
        return found

    def contents(self, number: int) -> list[str]:
        """A text per block of a layout that identifies its content (`contents_of`)."""
        found: list[str] = []
        for run in self.runs(number):
            found += contents_in(self.holder(number, run), number, run.first, run.count)
        return found

    def holder(self, number: int, run: BlockRun) -> TensorFile:
        """The open file with a run of blocks.

        Raises DamagedContextError if the file is missing, or contains other blocks than were saved.
        """
        if not run.file:
            return self.file
        if run.file not in self._others:
            path = self.file.path.with_name(run.file)
            try:
                self._others[run.file] = OpenContext.at(path)
            except ContextError as error:
                raise DamagedContextError(f"{self.file.where} has blocks in another file: {error}") from error
        file = self._others[run.file].file
        if rows_digest(file, number, run.first, run.count) != run.digest:
            raise DamagedContextError(f"{self.file.where}: {file.where} contains other blocks than were saved")
        return file

    def _layout(self, number: int) -> dict[str, Any]:
        layouts = self.metadata.get("layouts")
        layout = layouts[number] if isinstance(layouts, list) and number < len(layouts) else None
        return layout if isinstance(layout, dict) else {}

    def layout(self, number: int) -> tuple[int, np.ndarray]:
        """(block size, tokens in each block) of a layout."""
        layout, name = self._layout(number), f"layouts/{number}/lengths"
        if name not in self.file.entries or type(layout.get("block_size")) is not int:
            raise DamagedContextError(f"{self.file.where} has no blocks of layout {number}")
        part = SavedPart({name: self.file.tensor(name)}, where=self.file.where)
        return layout["block_size"], part.indices(name, (None,), torch.int32, layout["block_size"] + 1).numpy()


def _metadata(file: TensorFile) -> dict[str, Any]:
    try:
        metadata = json.loads(file.metadata[KEY])
    except (KeyError, ValueError, RecursionError) as error:
        raise DamagedContextError(f"{file.where} is not a saved context: its metadata lack {KEY}") from error
    if not isinstance(metadata, dict):
        raise DamagedContextError(f"{file.where} has no readable metadata under {KEY}")
    if metadata.get("format") != FORMAT:
        raise ContextError(
            f"{file.where} was written by hetero-kv {shown(metadata.get('version'), 40)} in format "
            f"{shown(metadata.get('format'), 40)}, and this is {version()}, which reads format {FORMAT}: load it with "
            "that version, or prefill again"
        )
    return metadata
