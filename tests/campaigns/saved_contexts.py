"""Damaged saved contexts: flipped bits, truncated files, and nonsense with valid checksums."""

from __future__ import annotations

import json
import logging
import mmap
import random as randomness
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaigns.campaign import Campaign, WrongResultError

ENTRIES = {"policy": "h2o", "budget": 24}
FACTORS = {"rank": 8, "landmark_chunk_size": 4, "outlier_chunks": 3, "local_chunks": 2, "sparse_budget": 16}
RULES = [
    {"match": {"name": r"layers\.0\.self_attn$"}, "replace": {"class": "BoundedAttention", "kwargs": ENTRIES}},
    {"match": {"name": r"layers\.1\.self_attn$"}, "replace": {"class": "ShadowKVAttention", "kwargs": FACTORS}},
    {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
    {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
]  # fmt: skip
SMALL = {
    "block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "chunk_size": 16, "max_seq_len": 256, "kv_type": "FP32",
    "top_k_blocks": 3, "threads_num": 1, "preselect_block": True, "preselect_block_count": 5, "layer_step": 2,
}  # fmt: skip


class Prepared(NamedTuple):
    """What all tries share: a model, two contexts of it, their files, and what follows the first."""

    model: Any
    caches: tuple[Any, Any]
    files: tuple[bytes, bytes]
    tokens: list[list[int]]
    expected: Any


def prepare(folder: Path) -> Prepared:
    """Two contexts, the second with more tokens than the first."""
    import torch

    from hetero_kv import HeteroCache, inject
    from hetero_kv.rules.rule_file import parse_rules
    from hetero_kv.threads import set_threads
    from tests.support.tiny_models import tiny_model

    set_threads(1)
    # Every recomputation is reported.
    logging.getLogger("hetero_kv").setLevel(logging.ERROR)
    model = tiny_model("llama")
    inject(model, parse_rules({"rules": RULES, "long_context": SMALL}))
    ids = torch.randint(2, 97, (1, 60), generator=torch.Generator().manual_seed(1))
    cache = HeteroCache(model)
    with torch.no_grad():
        for part in (ids[:, :50], ids[:, 50:51]):
            model(part, past_key_values=cache)
        longer = cache.fork()
        model(ids[:, 51:], past_key_values=longer)
    contents = []
    for number, each in enumerate((cache, longer)):
        each.save(folder / str(number), ids.tolist())
        contents.append((folder / str(number)).read_bytes())
    return Prepared(model, (cache, longer), tuple(contents), ids.tolist(), following(model, folder / "0"))


def following(model: Any, path: Path, **settings: Any) -> Any:
    """The logits of three tokens behind the context at `path`."""
    import torch

    from hetero_kv import HeteroCache

    cache = HeteroCache.load(path, model, **settings)
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7]])
        return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], dim=1)


def attempt_damage(prepared: Prepared, random: randomness.Random, folder: Path) -> None:
    """Half of the tries flip bits, a fifth cuts the file off, the others write nonsense under right checksums."""
    kind = random.choices(("flip", "cut", "nonsense"), (5, 2, 3))[0]
    content, path = bytearray(prepared.files[0]), folder / "c"
    if kind == "flip":
        for _ in range(random.randint(1, 3)):
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del content[random.randrange(len(content)) :]
    else:
        content = bytearray(nonsense(bytes(content), random))
    path.write_bytes(content)
    try:
        logits = following(prepared.model, path, repair=False)
    finally:
        if kind == "flip":
            _repaired(prepared, path)
    if kind != "nonsense" and not logits.equal(prepared.expected):
        raise WrongResultError(f"a {kind} was taken, and something else follows")


def _repaired(prepared: Prepared, path: Path) -> None:
    """Recomputed blocks are near the original ones: their layers attend to fewer tokens than a prompt does."""
    from hetero_kv.engine.errors import ContextError

    try:
        logits = following(prepared.model, path)
    except ContextError:
        return
    if not logits.isfinite().all():
        raise WrongResultError("what was computed anew is no number")


def nonsense(content: bytes, random: randomness.Random) -> bytes:
    """The file with something else in its header, or in one of its small tensors, under checksums that fit."""
    from hetero_kv.contexts import tensor_file
    from hetero_kv.contexts.tensor_header import PREFIX

    length = int.from_bytes(content[:PREFIX], "little")
    header = json.loads(content[PREFIX : PREFIX + length])
    data = bytearray(content[PREFIX + length :])
    if random.random() < 0.6:
        said = json.loads(header["__metadata__"]["hetero_kv_context"])
        _change(said, random)
        header["__metadata__"]["hetero_kv_context"] = json.dumps(said)
    elif random.random() < 0.5:
        _change(header, random)
    else:
        small = [name for name in header if name.startswith(("layouts/", "cohorts/", "parts/"))]
        start, stop = header[random.choice(small)]["data_offsets"]
        if stop > start:
            data[random.randrange(start, stop)] = random.randrange(256)
    return sealed(header, data, tensor_file)


def _change(said: Any, random: randomness.Random) -> None:
    """Let something in nested dicts and lists be something else."""
    places = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(said)
    holder, key = random.choice(places)
    others = (None, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, "x", [], {}, [1], True, float("nan"))
    if isinstance(holder, dict) and random.random() < 0.2:
        del holder[key]
    elif type(holder[key]) is int and random.random() < 0.6:
        holder[key] += random.choice((-7, -1, 1, 3, 64))
    else:
        holder[key] = random.choice(others)


def sealed(header: Any, data: bytearray, tensor_file: Any) -> bytes:
    """The file with new checksums and seal, as far as the header locates them."""
    import hashlib
    import zlib

    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % mmap.PAGESIZE)
    head = len(text).to_bytes(8, "little") + text
    try:
        sums = []
        for name, entry in header.items():
            if name.startswith(("__metadata__", tensor_file.PADDING)) or name in (
                tensor_file.CHECKSUMS,
                tensor_file.SEAL,
            ):
                continue
            start, stop = entry["data_offsets"]
            rows = entry["shape"][0] if name.startswith("blocks/") else 1
            size = (stop - start) // max(1, rows)
            sums += [zlib.crc32(data[start + row * size : start + (row + 1) * size]) for row in range(rows)]
        written = b"".join(each.to_bytes(8, "little") for each in sums)
        at, seal = header[tensor_file.CHECKSUMS]["data_offsets"], header[tensor_file.SEAL]["data_offsets"]
        data[at[0] : at[1]] = written
        data[seal[0] : seal[1]] = hashlib.sha256(head + written).digest()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        pass
    return head + bytes(data)


CAMPAIGNS = (Campaign("damaged contexts", 10, prepare, attempt_damage),)
