"""A server whose engines guess by a draft model."""

from __future__ import annotations

from dataclasses import replace

import httpx2 as httpx
import pytest

from hetero_kv.server import models_to_load
from tests.server.running import host_of, running, tiny_loaded, tiny_served
from tests.serving.number_tokenizer import Numbers
from tests.support.free_rows import FreeRows

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_request_names_the_draft_model_and_no_file(tmp_path):
    served = tiny_served(speculation=tiny_loaded(name="small"))
    served.engine._speculation.costs = FreeRows()
    body = {"prompt": [9, 8, 7, 6, 5] * 4, "max_tokens": 16, "ignore_eos": True}
    with served.engine, running(host_of(served, folder=tmp_path)) as address:
        ways = ({"speculation": "off"}, {}, {"speculation": "small"}, {"speculation": "./other.gguf"})
        found = [httpx.post(f"{address}/v1/completions", json={**body, **way}, timeout=60) for way in ways]
        lines = httpx.get(f"{address}/metrics").text.splitlines()
    texts = [each.json()["choices"][0]["text"] for each in found[:3]]
    drafted = [each.json()["timings"].get("draft_n", 0) for each in found[:3]]
    assert texts[1:] == [texts[0]] * 2
    assert drafted[0] == 0 < min(drafted[1:])
    assert f'hetero_kv_drafted_tokens_total{{model="tiny:dense"}} {sum(drafted)}.0' in lines
    assert found[3].status_code == 400
    assert "speculation is './other.gguf'; it must be one of off, lookup, sparse, auto, small" in found[3].text


def test_engines_share_a_draft_model_and_one_with_other_tokens_does_without(monkeypatch, caplog):
    small, loads = tiny_loaded(name="small"), []
    monkeypatch.setattr(models_to_load, "load_draft", lambda *arguments: loads.append(arguments) or small)
    draft = models_to_load._SharedDraft("small.gguf")
    first, bounded = tiny_loaded(), tiny_loaded("h2o")
    # An engine that cannot verify says so itself.
    assert draft.of(bounded) == "small.gguf"
    assert [draft.of(first), draft.of(first), draft.for_further(first)] == [small] * 3
    assert len(loads) == 1
    assert draft.for_further(replace(first, name="another", tokenizer=Numbers())) == "auto"
    assert "another: speculation is auto, because the draft model has other tokens" in caplog.text
    assert models_to_load._SharedDraft("lookup").of(first) == "lookup"


def test_a_way_that_the_rules_do_not_allow_is_named_as_without_effect(tmp_path):
    served = tiny_served("h2o")
    with served.engine, running(host_of(served, folder=tmp_path)) as address:
        found = [
            httpx.post(
                f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 1, "speculation": way}, timeout=60
            )
            for way in ("lookup", "off")
        ]
    ignored = [each.headers.get("x-hetero-kv-ignored", "") for each in found]
    assert ignored[0].startswith("speculation (model.layers.0.self_attn")
    assert ignored[1] == ""
