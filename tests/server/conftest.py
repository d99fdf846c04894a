"""One tiny server for all tests of a file."""

from __future__ import annotations

import functools
import ssl

import httpx2 as httpx
import pytest

from tests.server.running import host_of, running, tiny_served


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once():
    """Every client would read the system's certificates, which takes longer than a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="module")
def served():
    """A tiny model under `dense`, and its engine."""
    found = tiny_served()
    with found.engine:
        yield found


@pytest.fixture(scope="module")
def address(served, tmp_path_factory):
    """The address of a server of `served`, without API keys."""
    with running(host_of(served, folder=tmp_path_factory.mktemp("files"))) as found:
        yield found


@pytest.fixture(scope="module")
def http(address):
    """A client of it."""
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client
