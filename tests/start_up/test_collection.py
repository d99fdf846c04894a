"""Garbage collection while a command starts."""

from __future__ import annotations

import gc
import weakref

import pytest

from hetero_kv.start_up.collection import collection_deferred


class Cyclic:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen():
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_while_collection_is_deferred_and_everything_later_is_afterwards():
    with collection_deferred():
        assert not gc.isenabled()
        begun = weakref.ref(Cyclic())
    assert gc.isenabled()
    later = weakref.ref(Cyclic())
    gc.collect()
    assert begun() is not None
    assert later() is None


def test_only_the_first_start_exempts_its_objects():
    with collection_deferred():
        pass
    with collection_deferred():
        second = weakref.ref(Cyclic())
    gc.collect()
    assert second() is None


def test_collection_that_was_off_stays_off_and_is_on_again_after_an_error():
    with pytest.raises(KeyboardInterrupt), collection_deferred():
        raise KeyboardInterrupt
    assert gc.isenabled()
    gc.disable()
    with collection_deferred():
        pass
    assert not gc.isenabled()
