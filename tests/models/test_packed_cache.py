"""Packed weights are kept for the next start, which never takes those of another file or version, or damaged ones."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.models import open_model, packed_cache, packed_file
from hetero_kv.models.gguf import packed_tensors
from hetero_kv.models.packed_cache import PackedCache
from hetero_kv.planning import plan
from tests.models.tiny_gguf import SIZES, write
from tests.support.tiny_qwen2 import TOKENS

ROOMY = 1 << 40
# Copied into memory, and mapped.
ROOMS = {"copied": ROOMY, "mapped": 0}
MATRICES = {
    "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
    "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96),
}  # fmt: skip


def written(path, seed=0, kind=GGMLQuantizationType.Q8_0):
    """A tiny Llama, whose rows of queries and keys the converter reorders."""
    random = np.random.default_rng(seed)
    tensors = {"token_embd.weight": (len(TOKENS), 64), "output.weight": (len(TOKENS), 64), "output_norm.weight": (64,)}
    for layer in range(SIZES["block_count"]):
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in MATRICES.items()}
        tensors |= {f"blk.{layer}.{name}.weight": (64,) for name in ("attn_norm", "ffn_norm")}
    numbers = {name: random.normal(size=shape).astype(np.float32) for name, shape in tensors.items()}
    return write(path, "llama", SIZES, numbers, kind)


def opened(path, *, limit=ROOMY, room=ROOMY, cached=True, **settings):
    cache = PackedCache(limit, room) if cached else None
    model = open_model(path, dtype="float32", device="cpu", packed_cache=cache)
    inject(model.model, "dense", command_line={"block_size": 4, "max_seq_len": 256, **settings})
    return model


def loaded(path, **arguments):
    return opened(path, **arguments).load().model


def packed_bytes(model):
    return {
        (path, number): weights.data.numpy().tobytes()
        for path, module in model.named_modules()
        if isinstance(module, QuantizedModule)
        for number, weights in enumerate(module.packed_weights())
    }


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The cache's folder; files of any size and age are kept."""
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed_cache, "WORTH_KEEPING", 1)
    monkeypatch.setattr(packed_cache, "SETTLED_NS", 0)
    return tmp_path / "home" / "packed"


@pytest.fixture
def packings(monkeypatch):
    """The shapes of the matrices that are packed for the cache, as they are packed."""
    found, pack = [], packed_tensors.pack

    def counted(blocks, *arguments):
        found.append(blocks.shape)
        return pack(blocks, *arguments)

    monkeypatch.setattr(packed_tensors, "pack", counted)
    return found


@pytest.fixture
def model_file(tmp_path):
    return written(tmp_path / "tiny.gguf")


@pytest.fixture
def expected(model_file):
    return packed_bytes(loaded(model_file, cached=False))


def only_file(home):
    (path,) = home.glob(f"*/{packed_cache.WEIGHTS_FILE}")
    return path


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_the_second_start_reads_what_the_first_packed(model_file, expected, packings, home, room):
    assert packed_bytes(loaded(model_file, room=room)) == expected
    assert len(packings) == len(expected) == 2 * len(MATRICES) + 2
    packings.clear()
    model = loaded(model_file, room=room)
    assert packed_bytes(model) == expected
    assert packings == []
    home.rename(home.with_name("moved"))
    ids = torch.arange(5)[None]
    logits = model(ids, past_key_values=HeteroCache(model, 64)).logits
    plain = loaded(model_file, cached=False)
    assert torch.equal(logits, plain(ids, past_key_values=HeteroCache(plain, 64)).logits)


def test_another_file_of_the_same_name_size_and_time_gets_its_own_weights(model_file, expected, packings):
    loaded(model_file)
    times = model_file.stat()
    written(model_file, seed=1)
    os.utime(model_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_file.stat().st_size == times.st_size
    packings.clear()
    others = packed_bytes(loaded(model_file))
    assert len(packings) == len(expected)
    assert others == packed_bytes(loaded(model_file, cached=False))
    assert others != expected


def test_another_version_of_the_code_packs_again(model_file, expected, packings, monkeypatch):
    loaded(model_file)
    packings.clear()
    monkeypatch.setattr(packed_cache, "_code_version", lambda: "another")
    assert packed_bytes(loaded(model_file)) == expected
    assert len(packings) == len(expected)


def test_rules_that_pack_other_matrices_have_a_file_of_their_own(model_file, expected, home):
    loaded(model_file)
    assert packed_bytes(loaded(model_file, weights="bf16")) == {}
    assert packed_bytes(loaded(model_file)) == expected
    assert only_file(home)


def change_byte(path, place):
    content = bytearray(path.read_bytes())
    content[place(content)] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "byte": lambda path: change_byte(path, lambda content: len(content) // 2),
    "first byte of a tensor": lambda path: change_byte(path, lambda content: 64),
    "table": lambda path: change_byte(path, lambda content: len(content) - 100),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "of another model": lambda path: shutil.copy(path.parent.with_name("other"), path),
}


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_packed_again_and_it_is_said(
    model_file, expected, packings, home, caplog, tmp_path, damage, room
):
    loaded(written(tmp_path / "other.gguf", seed=1))
    only_file(home).rename(home / "other")
    shutil.rmtree(next(path for path in home.iterdir() if path.is_dir()))
    loaded(model_file, room=room)
    loaded(model_file, room=room)
    DAMAGES[damage](only_file(home))
    packings.clear()
    with caplog.at_level(logging.WARNING):
        assert packed_bytes(loaded(model_file, room=room)) == expected
    assert "packed again" in caplog.text
    assert len(packings) == len(expected)
    packings.clear()
    assert packed_bytes(loaded(model_file, room=room)) == expected
    assert packings == []


def test_weights_that_are_mapped_are_checked_once(model_file, expected, monkeypatch):
    loaded(model_file, room=0)
    loaded(model_file, room=0)
    monkeypatch.setattr(packed_file.PackedFile, "check", lambda self: pytest.fail("checked again"))
    assert packed_bytes(loaded(model_file, room=0)) == expected


def test_a_plan_leaves_memory_to_weights_that_are_mapped(model_file, monkeypatch):
    monkeypatch.setattr(plan, "free_dram", lambda: 1 << 40)
    copied, mapped = loaded(model_file), loaded(model_file, room=0)
    size = sum(map(len, packed_bytes(mapped).values()))
    assert plan.Plan.of(copied.hetero_kv_injection).dram == 1 << 40
    assert plan.Plan.of(mapped.hetero_kv_injection).dram == (1 << 40) - size
    monkeypatch.setattr(plan, "free_dram", lambda: size)
    assert plan.Plan.of(mapped.hetero_kv_injection).dram == size // 2


def test_starts_at_the_same_time_share_one_file(model_file, expected, home):
    models = [opened(model_file) for _ in range(3)]
    with ThreadPoolExecutor(len(models)) as pool:
        found = list(pool.map(lambda model: packed_bytes(model.load().model), models))
    assert found == [expected] * 3
    assert [path.name for path in only_file(home).parent.iterdir()] == [packed_cache.WEIGHTS_FILE]


def test_a_full_disk_costs_the_cache_alone(model_file, expected, home, monkeypatch, caplog):
    def full(path, pieces, **_):
        next(iter(pieces))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_file, "write_pieces_atomically", full)
    assert packed_bytes(loaded(model_file)) == expected
    assert "packed weights are not kept" in caplog.text
    assert "No space left" in caplog.text
    assert not list(home.glob("*/*"))


def test_weights_of_more_than_half_of_the_free_disk_are_not_kept(model_file, expected, home, monkeypatch, caplog):
    few = shutil.disk_usage(model_file)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: few)
    assert packed_bytes(loaded(model_file)) == expected
    assert "packed weights are not kept" in caplog.text
    assert not home.exists()


def test_the_least_recently_used_weights_leave_beyond_the_limit(tmp_path, home, packings):
    first, second, third = (written(tmp_path / f"{seed}.gguf", seed) for seed in range(3))
    loaded(first)
    size = only_file(home).stat().st_size
    loaded(second)
    loaded(first)
    loaded(third, limit=2 * size + size // 2)
    packings.clear()
    loaded(first)
    loaded(third)
    assert packings == []
    loaded(second)
    assert packings != []


@pytest.mark.parametrize("limit", [0, 1000])
def test_weights_beyond_the_limit_are_not_kept(model_file, expected, home, limit):
    assert packed_bytes(loaded(model_file, limit=limit)) == expected
    assert not home.exists()


def test_a_file_that_was_just_written_is_not_kept(model_file, expected, home, monkeypatch):
    monkeypatch.setattr(packed_cache, "SETTLED_NS", 3600 * 1_000_000_000)
    assert packed_bytes(loaded(model_file)) == expected
    assert not home.exists()
