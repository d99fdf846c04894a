"""The entries of a context's file in a store's index."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from hetero_kv.contexts import addresses
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.index import NewContext, StoredContext
from hetero_kv.engine.errors import DamagedContextError


def index_entries(path: Path, context: OpenContext) -> NewContext:
    """The index entries of a file that has its blocks in others."""
    identity, where = addresses.salted(context.identity.digest, context.salt), context.file.where
    tokens = context.stored_tokens
    if len(tokens) != 1:
        raise DamagedContextError(f"{where} has {len(tokens)} sequences with tokens; a store has one per file")
    needs = {run.file for number in range(context.layouts) for run in context.runs(number) if run.file}
    notes = context.metadata.get("notes")
    name = notes.get("name") if isinstance(notes, dict) else None
    status = path.stat()
    stored = StoredContext(
        path.name, name if isinstance(name, str) else None, context.identity.model, len(context.tokens[0]),
        status.st_size, status.st_mtime, max(status.st_mtime, time.time()), identity,
    )  # fmt: skip
    return NewContext(stored, [], sorted(needs), addresses.prefix_addresses(identity, tokens[0]))


def with_blocks(new: NewContext, context: OpenContext) -> NewContext:
    """The index entries with the addresses of the blocks in the context's own file, each with its row there."""
    identity, blocks = new.stored.identity, list[tuple[bytes, int]]()
    for number in range(context.layouts):
        start, block_size, contents = 0, context.layout(number)[0], context.contents(number)
        found = addresses.block_addresses(identity, number, context.stored_tokens[0], block_size, contents)
        for run in context.runs(number):
            if not run.file:
                blocks += [(found[start + row], run.first + row) for row in range(run.count)]
            start += run.count
    return replace(new, blocks=blocks)
