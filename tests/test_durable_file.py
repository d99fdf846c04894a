"""Files appear whole or not at all, with the umask's permissions, and without temporary files."""

from __future__ import annotations

import errno
import os
import stat
import threading

import pytest

from hetero_kv.durable_file import move_durably, write_atomically


@pytest.fixture
def umask():
    """Sets the process's umask; it is the old one again after the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_those_that_the_umask_leaves(tmp_path, umask, mask, mode):
    umask(mask)
    write_atomically(tmp_path / "file", "text")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def synced(monkeypatch):
    """What is waited for: "file" and "folder" in order, with "rename" where a file gets its name."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        seen.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noted_replace(*paths):
        seen.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return seen


def test_content_is_on_the_disk_before_the_name_and_the_name_before_it_returns(tmp_path, monkeypatch):
    seen = synced(monkeypatch)
    write_atomically(tmp_path / "file", "text")
    (tmp_path / "other").write_text("other")
    move_durably(tmp_path / "other", tmp_path / "file")
    assert seen == ["file", "rename", "folder"] * 2
    assert (tmp_path / "file").read_text() == "other"


def test_a_full_disk_leaves_only_the_old_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "file", "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_killed_processs_leftovers_are_overwritten(tmp_path):
    (tmp_path / "file.partial").write_text("half of something much longer")
    write_atomically(tmp_path / "file", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "text"


def test_a_link_in_the_place_of_the_partial_file_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "file.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_a_file_that_is_there_may_be_left_as_it_is(tmp_path):
    (tmp_path / "file").write_text("mine")
    write_atomically(tmp_path / "file", "text", replaces=False)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_writers_at_one_time_leave_one_of_their_files_whole(tmp_path):
    texts = [letter * 100_000 for letter in "abcdefgh"]
    failed = []

    def written(text):
        try:
            for _ in range(5):
                write_atomically(tmp_path / "file", text)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=written, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failed == []
    assert (tmp_path / "file").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
