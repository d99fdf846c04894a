"""A prompt takes over from requests of its own tenant alone: in memory, and from a folder of contexts."""

from __future__ import annotations

import pytest

from hetero_kv import SamplingParams
from hetero_kv.contexts.store import ContextStore
from hetero_kv.errors import HeteroKVError
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = PROMPTS[3]
FOLLOWING = [*FIRST, 5, 6, 7]
ONE = SamplingParams(max_new_tokens=1)


def reused(engine, tokens, tenant):
    return engine.generate(tokens, ONE, tenant=tenant).result().cached_tokens


def test_a_kept_sequence_is_found_by_its_tenant_alone():
    with engine_of("dense") as engine:
        assert reused(engine, FIRST, "ann") == 0
        other = engine.generate(FOLLOWING, GREEDY, tenant="bob").result()
        assert (other.cached_tokens, other.reuse.reason) == (0, "nothing_kept")
        assert other.tokens == alone(engine, FOLLOWING)
        assert reused(engine, FOLLOWING, "") == 0
        assert reused(engine, FOLLOWING, "ann") == len(FIRST)


def test_a_sequence_that_is_being_answered_is_found_by_its_tenant_alone():
    with engine_of("dense") as engine:
        answering = engine.generate(FIRST, SamplingParams(max_new_tokens=60, ignore_eos=True), tenant="ann")
        while not answering._pieces:
            engine.step()
        assert reused(engine, FOLLOWING, "bob") == 0
        assert reused(engine, FOLLOWING, "ann") == len(FIRST)
        assert not answering.is_done


def test_a_stored_sequence_is_found_by_its_tenant_alone_also_with_a_rebuilt_index(tmp_path):
    with engine_of("dense", context_folder=tmp_path) as engine:
        reused(engine, FIRST, "ann")
    for _ in range(2):
        # Nothing is written here, so that what a tenant finds is what it stored before.
        with engine_of("dense", context_folder=tmp_path, context_cache_gb=1e-9) as engine:
            assert reused(engine, FOLLOWING, "bob") == reused(engine, FOLLOWING, "") == 0
            assert reused(engine, FOLLOWING, "ann") == len(FIRST)
        (tmp_path / "index.sqlite").unlink()


def test_tenants_share_no_blocks_on_the_disk(tmp_path):
    with engine_of("dense", context_folder=tmp_path) as engine:
        for tenant in ("ann", "bob"):
            reused(engine, FIRST, tenant)
    with ContextStore(tmp_path) as contexts:
        first, second = contexts.contexts()
        assert first.bytes == pytest.approx(second.bytes, rel=0.02)
        assert all(len(contexts.details(each)["files"]) == 1 for each in (first, second))


def test_a_tenant_keeps_its_newest_contexts_within_its_limit(tmp_path):
    with engine_of("dense", context_folder=tmp_path, contexts_per_tenant=2) as engine:
        for tokens in PROMPTS[1:4]:
            reused(engine, tokens, "ann")
        reused(engine, PROMPTS[6], "bob")
    with ContextStore(tmp_path) as contexts:
        assert sorted(each.tokens for each in contexts.contexts()) == sorted(map(len, (*PROMPTS[2:4], PROMPTS[6])))
    with pytest.raises(HeteroKVError, match="Engine: contexts_per_tenant is 0; it must be at least 1"):
        engine_of("dense", contexts_per_tenant=0)
