"""Freed memory is kept during a prompt and returned to the system afterwards."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter import chunked_decoder_layer
from hetero_kv.malloc_tuning import freed_memory_kept, give_back_freed_memory
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")

#: What a process keeps of 100 MB that it freed: by default, within the context, after it, and where it failed.
FREED = """
import ctypes, psutil
from hetero_kv.malloc_tuning import freed_memory_kept, give_back_freed_memory

library, size = ctypes.CDLL(None), 100 << 20
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
start = psutil.Process().memory_info().rss

def left():
    place = library.malloc(size)
    ctypes.memset(place, 1, size)
    library.free(place)
    return round((psutil.Process().memory_info().rss - start) / size)

print(left())
with freed_memory_kept():
    print(left())
    print(left())
give_back_freed_memory()
print(round((psutil.Process().memory_info().rss - start) / size))
print(left())
try:
    with freed_memory_kept():
        print(left())
        raise RuntimeError
except RuntimeError:
    print(round((psutil.Process().memory_info().rss - start) / size))
"""


def printed(**settings):
    names = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"
    environment = {key: value for key, value in os.environ.items() if key not in names} | settings
    command = [sys.executable, "-c", FREED]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()


def test_freed_memory_is_kept_within_the_context_alone():
    assert printed() == ["0", "1", "1", "0", "0", "1", "0"]


def test_a_users_malloc_settings_stay_in_force():
    assert printed(MALLOC_MMAP_THRESHOLD_="131072") == ["0"] * 7


def test_other_c_libraries_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr("hetero_kv.malloc_tuning._library", lambda: None)
    with freed_memory_kept():
        give_back_freed_memory()


@pytest.mark.parametrize(("tokens", "is_long"), [(40, False), (600, True)])
def test_long_prompts_keep_it_from_layer_to_layer(monkeypatch, tokens, is_long):
    calls = []

    @contextmanager
    def kept():
        calls.append("kept")
        yield

    monkeypatch.setattr(chunked_decoder_layer, "freed_memory_kept", kept)
    monkeypatch.setattr(chunked_decoder_layer, "give_back_freed_memory", lambda: calls.append("given back"))
    model = tiny_model("llama")
    inject(model, "dense", command_line={"max_seq_len": 1024, "chunk_size": 400})
    with torch.no_grad():
        model(torch.randint(0, 90, (1, tokens)), past_key_values=HeteroCache(model))
    chunks = 2 * len(model.model.layers)
    assert calls == (["kept"] * chunks + ["given back"] if is_long else [])
