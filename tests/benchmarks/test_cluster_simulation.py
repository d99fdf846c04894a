"""The model of a cluster computes what a replica would, and every router answers every question."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.cluster_simulation import COLUMNS, row
from benchmarks.simulated_cluster.costs import Costs
from benchmarks.simulated_cluster.replica import Question, Replica
from benchmarks.simulated_cluster.routers import ROUTERS, PrefixCacheAffinity
from benchmarks.simulated_cluster.simulation import Scenario, Simulation
from hetero_kv.serving.cluster.routing import RoutedRequest

COSTS = Costs(prefill_tokens_per_s=100.0, steps_s=((1, 0.05), (2, 0.06), (4, 0.08)), row_limit=4)
HASHES = [tuple(range(1000 * document, 1000 * document + 6)) for document in range(5)]
SMALL = Scenario(
    "ours", per_s=2.0, conversations=300, replicas=8, documents=40, document_tokens=600, memory_tokens=4000
)


def question(number, document=0, came=0.0, answer=20):
    return Question(number, document, 400, answer, came, RoutedRequest(450, HASHES[document]))


def replica(memory_tokens=1000, fetches=None):
    return Replica("one", COSTS, memory_tokens, HASHES, fetches)


def finished(one, until=np.inf):
    """Go on until nothing happens any more; returns number -> when it ended."""
    ends = {}
    while one.next_change <= until and one.next_change < np.inf:
        at = one.next_change
        ends.update({each.number: at for each in one.advance(at)})
    return ends


def test_a_question_takes_the_time_of_its_tokens():
    one, routed = replica(), question(0)
    one.add(routed)
    assert finished(one) == {0: pytest.approx(4.5 + 20 * 0.05)}
    assert routed.first_token_at == pytest.approx(4.5)
    assert one.busy_s == pytest.approx(5.5)


def test_a_second_question_computes_its_own_tokens_alone():
    one, routed = replica(), question(1)
    one.add(question(0))
    finished(one)
    began = one.next_change if one.next_change < np.inf else 5.5
    one.add(routed)
    finished(one)
    assert routed.first_token_at - began == pytest.approx(0.5)
    assert (routed.hits, one.prefills) == (400, {0: 1})


def test_rows_share_the_steps_and_no_more_than_the_limit_run():
    one = replica()
    for number in range(6):
        one.add(question(number, answer=100 + 10 * number))
    ends = finished(one)
    assert sorted(ends) == list(range(6))
    # Four rows at 80 ms a step, while prompts of 50 tokens pass between, and then fewer.
    assert 100 * 0.05 + 4.5 < ends[0] < ends[1] < ends[5]


def test_a_prompt_beside_rows_passes_slower_and_its_steps_keep_the_gap():
    assert all(first > second for first, second in zip(COSTS.beside_per_s, COSTS.beside_per_s[1:], strict=False))
    assert max(COSTS.beside_s) <= COSTS.longest_gap_s
    assert all(beside >= 0.05 for beside in COSTS.beside_s[1:])


def test_the_least_recently_used_document_leaves_memory():
    one = replica(memory_tokens=900)
    for number, document in enumerate((0, 1, 0, 2, 0, 1)):
        one.add(question(number, document))
        finished(one)
    assert one.prefills == {0: 1, 1: 2, 2: 1}


def test_a_report_tells_the_queue_and_the_documents():
    one = replica()
    for number, document in enumerate((0, 1, 1)):
        one.add(question(number, document))
    report = one.report(2.0)
    assert (report.rows, report.waiting) == (1, 2)
    # 450 tokens, of which 200 have passed; a new document; and the same one again.
    assert report.queued_tokens == 250 + 450 + 50
    assert set(report.resident) == {*HASHES[0], *HASHES[1]}


def test_what_fails_loses_its_questions_and_its_memory():
    one = replica()
    for number in range(3):
        one.add(question(number))
    one.advance(4.5)
    assert {each.number for each in one.fail()} == {0, 1, 2}
    assert one.next_change == np.inf
    assert one.report(5.0).resident == ()


def test_rays_prefix_router_stays_with_a_full_replica_unless_it_has_a_threshold():
    for threshold, places in ((np.inf, 1), (3, 4)):
        alive = {name: Replica(name, COSTS, 1000, HASHES) for name in "abcd"}
        router, sent = PrefixCacheAffinity(alive, np.random.default_rng(0), threshold), set()
        for number in range(40):
            routed = question(number)
            name = router.choose(routed, 0.0)
            alive[name].add(routed)
            sent.add(name)
        assert len(sent) == places


@pytest.mark.parametrize("router", ROUTERS)
def test_every_question_is_answered_though_replicas_fail(router):
    scenario = replace(SMALL, router=router, life_s=60.0, repaired_s=10.0)
    outcome = Simulation(scenario).run()
    assert outcome.sent_again > 0
    assert np.isfinite(outcome.first_token_s).all()
    assert (outcome.total_s >= outcome.first_token_s).all()
    assert (outcome.hits < outcome.tokens).all()
    assert outcome.loads.max() <= 3 * scenario.conversations / scenario.per_s
    assert len(row(scenario, outcome)) == len(COLUMNS)
    again = Simulation(scenario).run()
    assert (again.first_token_s == outcome.first_token_s).all()


def test_our_router_computes_fewer_documents_than_round_robin():
    ours, turns = (Simulation(replace(SMALL, router=name)).run() for name in ("ours", "round robin"))
    assert ours.prefills_per_document < 0.7 * turns.prefills_per_document
    assert np.median(ours.first_token_s) < np.median(turns.first_token_s)


def test_with_a_shared_store_documents_are_fetched():
    alone, shared = (
        Simulation(replace(SMALL, router="round robin", shared_store=each)).run() for each in (False, True)
    )
    assert shared.prefills_per_document < 0.7 * alone.prefills_per_document
    assert shared.hits.sum() > alone.hits.sum()
