"""What an engine reports to routers, of each tenant apart."""

from __future__ import annotations

import pytest

from hetero_kv import SamplingParams
from hetero_kv.serving.cluster.prefix_hashes import block_hashes
from hetero_kv.serving.cluster.reporter import Reporter
from tests.serving.tiny_engine import GREEDY, PROMPTS, answered, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16


def test_an_idle_engine_has_nothing_and_nothing_to_do():
    with engine_of() as engine:
        reporter = Reporter(engine, BLOCK)
        first, second = reporter.report(), reporter.report()
    assert (first.resident, first.stored, first.rows, first.waiting, first.queued_tokens) == ((), (), 0, 0, 0)
    assert first.prefill_tokens_per_s is None
    assert first.decode_step_s is None
    assert first.row_limit == 8
    assert first.free_blocks > 0
    assert first.bytes_per_token > 0
    assert second.counter > first.counter
    assert second.time >= first.time


def test_resident_sequences_are_reported_the_most_recently_used_first():
    with engine_of() as engine:
        reporter = Reporter(engine, BLOCK)
        one, two = (answered(engine, tokens)[:-1] for tokens in PROMPTS[1:3])
        report = reporter.report()
        assert report.resident == (*block_hashes(two, BLOCK), *block_hashes(one, BLOCK))
        assert report.prefill_tokens_per_s > 0
        assert report.decode_step_s > 0
        assert report.free_blocks < Reporter(engine, 1).report().free_blocks
        answered(engine, PROMPTS[1])
        # The kept ones, and the answer again, which has the same beginning.
        assert reporter.report().resident == (*block_hashes(one, BLOCK), *block_hashes(two, BLOCK))


def test_the_queue_counts_what_waiting_prompts_have_in_common_once():
    with engine_of(max_batch=2) as engine:
        reporter = Reporter(engine, BLOCK)
        document = PROMPTS[3]
        for question in range(3):
            engine.generate([*document, question], GREEDY)
        report = reporter.report()
        assert (report.rows, report.waiting, report.row_limit) == (0, 3, 2)
        # 200 tokens are 12 whole blocks and 8 tokens.
        assert report.queued_tokens == 201 + 2 * 9
        assert set(report.resident) == set(block_hashes(document, BLOCK))
        engine.step()
        report = reporter.report()
        assert (report.rows, report.waiting) == (1, 2)
        assert report.queued_tokens == 2 * 9


def test_layers_that_cannot_go_back_are_reported_up_to_their_checkpoints():
    with engine_of(architecture="bamba", recipe="dense") as engine:
        tokens = answered(engine, PROMPTS[3])[:-1]
        hashes = block_hashes(tokens, BLOCK)
        resident = Reporter(engine, BLOCK).report().resident
        assert resident[-1] == hashes[-1]
        assert 0 < len(resident) < len(hashes)
        for depth in (hashes.index(each) + 1 for each in resident):
            stream = engine.generate([*tokens[: depth * BLOCK + BLOCK - 1], 3, 3], SamplingParams(max_new_tokens=1))
            assert stream.result().cached_tokens >= depth * BLOCK


def test_rules_that_share_no_beginnings_report_none():
    with engine_of(recipe="h2o") as engine:
        answered(engine, PROMPTS[2])
        assert Reporter(engine, BLOCK).report().resident == ()


def test_stored_beginnings_are_reported(tmp_path):
    with engine_of(context_folder=tmp_path) as engine:
        reporter = Reporter(engine, BLOCK)
        tokens = answered(engine, PROMPTS[2])[:-1]
        assert reporter.report().stored == ()
        while engine.step() or engine._prefixes.is_writing:
            pass
        assert reporter.report().stored == tuple(block_hashes(tokens, BLOCK))


def test_beginnings_whose_writing_failed_are_not_reported_as_stored(tmp_path):
    folder = tmp_path / "contexts"
    with engine_of(context_folder=folder) as engine:
        answered(engine, PROMPTS[2])
        folder.rename(tmp_path / "elsewhere")
        while engine.step() or engine._prefixes.is_writing:
            pass
        report = Reporter(engine, BLOCK).report()
        assert report.resident
        assert report.stored == ()


def test_reports_tell_the_sequences_of_tenants_apart():
    with engine_of() as engine:
        for tenant in ("ours", "theirs", ""):
            engine.generate(PROMPTS[3], GREEDY, tenant=tenant).result()
        resident = set(Reporter(engine, BLOCK).report().resident)
        for tenant in ("ours", "theirs", ""):
            assert resident >= set(block_hashes(PROMPTS[3], BLOCK, tenant))
        assert resident.isdisjoint(block_hashes(PROMPTS[3], BLOCK, "nobody's"))
