"""The simulated replicas of the recorded trace go step by step, and ours is the router that Ray's are measured by."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.measured_cluster.trace import RECORDED, Conversation, read
from benchmarks.simulated_cluster.replica import Question
from benchmarks.simulated_cluster.routers import ROUTERS
from benchmarks.simulated_cluster.stepping_replica import StepCosts, SteppingReplica, hashes
from benchmarks.simulated_cluster.traced import TraceSimulation
from hetero_kv.serving.cluster.routing import RoutedRequest

COSTS = StepCosts(shared=1.0, begin_s=0.0, read_s=0.04, row_s=0.01, small_token_s=0.002, large_token_s=0.004, kept=2)
BUSY = StepCosts(shared=1.6)


def question(document, tokens):
    return Question(0, document, 400, 3, 0.0, RoutedRequest(tokens, hashes(document, tokens)))


def answered(one, requested):
    """The seconds until an answer ends."""
    one.add(requested)
    now, ended = 0.0, []
    while not ended:
        now, ended = one.step(now)
    return now


def test_a_prompt_passes_in_parts_and_an_answer_in_steps():
    one, requested = SteppingReplica("one", COSTS), question(0, 410)
    assert answered(one, requested) == pytest.approx(410 * 0.004 + 2 * 0.04)
    assert requested.first_token_at == pytest.approx(410 * 0.004)
    assert (requested.hits, one.queue_length, one.busy_s) == (0, 0, pytest.approx(410 * 0.004 + 2 * 0.04))


def test_a_later_turn_computes_what_is_new():
    one, later = SteppingReplica("one", COSTS), question(0, 422)
    answered(one, question(0, 410))
    assert answered(one, later) == pytest.approx(0.04 + 10 * 0.002 + 2 * 0.04)
    assert later.hits == 412


@pytest.mark.parametrize(("keeps_turns", "hits"), [(False, 409), (True, 0)])
def test_turns_push_out_other_documents_only_where_each_is_kept(keeps_turns, hits):
    one, again = SteppingReplica("one", COSTS, keeps_turns), question(1, 410)
    for document, tokens in ((1, 410), (0, 410), (0, 430)):
        answered(one, question(document, tokens))
    answered(one, again)
    assert again.hits == hits


def test_a_report_counts_what_waits_and_is_new():
    one = SteppingReplica("one", COSTS)
    answered(one, question(0, 410))
    for each in (question(1, 410), question(0, 410), question(1, 410)):
        one.add(each)
    report = one.report(1.0)
    assert (report.rows, report.waiting) == (0, 3)
    # The last tokens of a prompt fill no block.
    assert report.queued_tokens == 410 + (410 - 384) + (410 - 384)
    assert set(report.resident) == {*hashes(0, 410), *hashes(1, 410)}


@pytest.mark.parametrize("router", ROUTERS)
def test_every_question_is_answered_in_turn(router):
    trace = [Conversation(0.1 * number, number % 3, 300, [0.5] * (number % 3)) for number in range(12)]
    ended = TraceSimulation(trace, router).run().ended
    assert Counter(each.document for each in ended) == {0: 4, 1: 8, 2: 12}
    assert all(each.first_token_at > each.came for each in ended)


def test_ours_computes_a_document_once_also_where_all_replicas_are_busy():
    """In a second replica it makes both queues longer, and longer queues would have more of them computed there."""
    trace = read(RECORDED)
    ours = TraceSimulation(trace, "ours", costs=BUSY).run().row("ours")
    others = TraceSimulation(trace, "power of two choices", costs=BUSY).run().row("")
    assert float(ours[5]) <= 1.1
    assert float(others[5]) > 2
