"""A loaded context is mapped copy-on-write, not read."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache
from hetero_kv.contexts import tensor_file
from hetero_kv.contexts.store import ContextStore
from tests.contexts.conversations import goes_on, said
from tests.contexts.long_documents import document, reader
from tests.support.slow_variants import with_few
from tests.support.small_families import random_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return reader()


@pytest.fixture
def mapped(monkeypatch):
    """Counts the bytes that are mapped."""
    counted, map_file = [], tensor_file.map_file

    def noted(target, descriptor, offset):
        before, behind = map_file(target, descriptor, offset)
        counted.append(len(target) - before - behind)
        return before, behind

    monkeypatch.setattr(tensor_file, "map_file", noted)
    return counted


@pytest.mark.parametrize("verify", with_few([True, False], quick=[True]))
def test_most_of_a_context_is_mapped_and_what_follows_is_the_same(model, tmp_path, mapped, verify):
    cache, ids = document(model)
    cache.save(tmp_path / "c", [ids])
    before = (tmp_path / "c").read_bytes()
    loaded = HeteroCache.load(tmp_path / "c", model, verify=verify)
    assert sum(mapped) > 0.7 * cache.dram_bytes
    # The memory of another goes meanwhile.
    (tmp_path / "c").rename(tmp_path / "d")
    assert torch.equal(goes_on(model, loaded, [0], 3), goes_on(model, cache, [0], 3))
    loaded.crop(-600)
    cache.crop(-600)
    assert torch.equal(goes_on(model, loaded, [0], 4), goes_on(model, cache, [0], 4))
    assert (tmp_path / "d").read_bytes() == before


def test_blocks_behind_those_of_another_file_are_mapped_too(model, tmp_path, mapped):
    with ContextStore(tmp_path) as store:
        cache, ids = document(model, 1201)
        store.save(cache, ids, "document")
        more = random_tokens(700, 2, 1)
        said(model, cache, (more, more[:, :0]))
        stored = store.save(cache, [*ids, *more[0].tolist()], "more")
        loaded = store.load(stored, model).cache
        assert sum(mapped) > 0.8 * cache.dram_bytes
        assert torch.equal(goes_on(model, loaded, [0], 3), goes_on(model, cache, [0], 3))


def test_damage_that_nobody_looked_for_is_not_read(model, tmp_path):
    cache, ids = document(model)
    cache.save(tmp_path / "c", [ids])
    file = tensor_file.TensorFile(tmp_path / "c")
    damaged, at = bytearray((tmp_path / "c").read_bytes()), file.offset("blocks/0/2/values", 100)
    file.close()
    damaged[at] ^= 1
    (tmp_path / "c").write_bytes(damaged)
    values = HeteroCache.load(tmp_path / "c", model, verify=False).layers[2].pool.values
    assert not torch.equal(values[100], cache.layers[2].pool.values[100])
    assert torch.equal(values[101], cache.layers[2].pool.values[101])
