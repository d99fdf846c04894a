"""An address that is away, slow or full: given up in time, and used again when it is back."""

from __future__ import annotations

import os
import time

import pytest

from hetero_kv.contexts.medium import UnreachableError
from hetero_kv.errors import ConfigError
from tests.contexts.shared.machines import TOKENS, document, fetched, identity_of, objects, upload, wait_until
from tests.support.faulty_files import FaultyFiles


def test_an_upload_that_is_cut_off_shows_nothing_and_goes_on_in_another_process(model, machine):
    cache, ids = document(model)
    one = machine("one")
    FaultyFiles.error = OSError("the network is gone")
    one.save(cache, ids)
    wait_until(lambda: one.failures > 1)
    one.close()
    FaultyFiles.error = None
    assert machine("two").contexts() == []
    again = machine("one")
    wait_until(lambda: not again._uploads.pending())
    assert fetched(machine("two"), model, [*ids, 5])[1] == TOKENS


def test_what_is_forgotten_or_gone_here_is_not_uploaded(model, machine):
    one = machine("one")
    FaultyFiles.error = OSError("the network is gone")
    one.save(*document(model, 1, 70), per_tenant=1)
    kept = one.save(*document(model, 2, 80), per_tenant=1)
    assert [each.file for each in one._uploads.pending()] == [kept.file]
    (one.folder / kept.file).unlink()
    FaultyFiles.error = None
    wait_until(lambda: not one._uploads.pending())
    assert objects("contexts/") == objects("blocks/") == []


def test_an_address_that_is_gone_is_used_again_when_it_is_back(model, machine, caplog):
    cache, ids = document(model)
    one = machine("one")
    FaultyFiles.error = OSError("Connection refused")
    with pytest.raises(UnreachableError, match=r"faulty://contexts is not reachable \(OSError: Connection refused\)"):
        one.fetch(identity_of(model), [*ids, 5])
    with pytest.raises(UnreachableError):
        one.contexts()
    one.save(cache, ids)
    # What is here is found, whatever is there.
    assert one.longest(identity_of(model), [*ids, 5])[1] == TOKENS
    # The upload's thread fails too, now or a moment later.
    wait_until(lambda: one.failures >= 2)
    FaultyFiles.error = None
    wait_until(lambda: not one._uploads.pending())
    assert fetched(machine("two"), model, [*ids, 5])[1] == TOKENS
    assert caplog.text.count("requests go on without it") == 1
    assert "faulty://contexts is reachable again" in caplog.text


@pytest.mark.parametrize("address", ["faulty://me:s3cret@host/contexts", "unknown://me:s3cret@host/contexts"])
def test_no_message_has_the_password_of_an_address(model, machine, caplog, address):
    FaultyFiles.error = OSError("Connection refused")
    with pytest.raises((UnreachableError, ConfigError), match=r"://me:\*\*\*@host/contexts is ") as raised:
        machine("one", address).contexts()
    assert "s3cret" not in f"{raised.value}{caplog.text}"


def test_an_address_that_hangs_is_given_up_in_time(model, machine):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    two = machine("two", wait_s=0.1)
    FaultyFiles.running.clear()
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"no answer within 0\.1 s"):
        two.fetch(identity_of(model), [*ids, 5])
    assert time.monotonic() - began < 5
    FaultyFiles.running.set()
    wait_until(lambda: not two._medium.away_s)
    assert fetched(two, model, [*ids, 5])[1] == TOKENS


def test_a_slow_address_is_given_up_between_two_objects(model, machine):
    cache, ids = document(model)
    upload(machine("one"), cache, ids)
    FaultyFiles.delay_s = 0.6
    two = machine("two", wait_s=1.0)
    with pytest.raises(UnreachableError, match="is too slow"):
        two.fetch(identity_of(model), [*ids, 5])


def test_a_folder_that_is_not_mounted_is_not_written_to(model, machine, tmp_path):
    cache, ids = document(model)
    shared = tmp_path / "shared"
    one = machine("one", f"file://{shared}")
    os.rename(shared, tmp_path / "elsewhere")
    shared.mkdir()
    one.save(cache, ids)
    with pytest.raises(UnreachableError, match=r"there is no hetero-kv-contexts.txt any more; mount the folder"):
        one.contexts()
    wait_until(lambda: one.failures > 2)
    assert list(shared.iterdir()) == []
    shared.rmdir()
    os.rename(tmp_path / "elsewhere", shared)
    wait_until(lambda: not one._uploads.pending())
    assert fetched(machine("two", f"file://{shared}"), model, [*ids, 5])[1] == TOKENS


def test_a_full_address_is_read_and_what_waits_for_it_is_bounded(model, machine, caplog):
    upload(machine("one"), *document(model, 0))
    FaultyFiles.write_error = OSError("no space is left")
    two = machine("two", local=1)
    named = two.save(*document(model, 1), "notes")
    for seed in (2, 3, 4):
        newest = two.save(*document(model, seed))
    assert [each.file for each in two._uploads.pending()] == [named.file, newest.file]
    assert {path.name for path in two.folder.glob("*.safetensors")} == two._uploads.files()
    assert "were not uploaded to faulty://contexts in time are removed: 1 do not fit" in caplog.text
    wait_until(lambda: two.failures > 1)
    assert "faulty://contexts cannot be written (OSError: no space is left)" in caplog.text
    assert fetched(machine("three"), model, [*document(model, 0)[1], 5])[1] == TOKENS
    assert len(two.contexts()) == 3
    FaultyFiles.write_error = None
    wait_until(lambda: not two._uploads.pending())
    assert len(machine("four").contexts()) == 3
