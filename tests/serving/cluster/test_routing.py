"""Where a router sends requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.cluster.prefix_hashes import block_hashes
from hetero_kv.serving.cluster.replica_report import ReplicaReport
from hetero_kv.serving.cluster.routing import RoutedRequest, Router, RouterSettings

SETTINGS = RouterSettings(block_size=4, period_s=0.5, fresh_periods=4, known_periods=20, fetch_bytes_per_s=1e6)
IDLE = ReplicaReport(
    4, row_limit=8, free_blocks=100, prefill_tokens_per_s=100.0, decode_step_s=0.01, decode_row_s=0.001,
    bytes_per_token=1000.0,
)  # fmt: skip


def document(number):
    """The hashes of a document of 400 tokens."""
    return tuple(block_hashes([number] * 400, 4))


def request(number=1, question=40, **others):
    """A question about a document."""
    return RoutedRequest(400 + question, document(number), **others)


def holding(*numbers, **changes):
    """An idle replica with these documents."""
    return replace(IDLE, resident=tuple(each for number in numbers for each in document(number)), **changes)


def router(seed=0):
    return Router(SETTINGS, np.random.default_rng(seed))


def first(*args, **kwargs):
    return router().rank(*args, **kwargs)[0]


def test_a_request_goes_where_its_document_is():
    assert first(request(2), {"a": holding(1), "b": holding(2), "c": IDLE}, 0.0) == "b"
    assert first(request(1), {"a": holding(1), "b": holding(2), "c": IDLE}, 0.0) == "a"


def test_of_two_replicas_the_one_with_more_of_the_beginning_is_first():
    half = replace(IDLE, resident=document(1)[:50])
    assert router().rank(request(1), {"a": IDLE, "b": half, "c": holding(1)}, 0.0) == ["c", "b", "a"]


def test_a_document_gets_a_second_replica_when_the_queue_of_the_first_costs_more():
    """400 tokens take 4 seconds, for which two others wait too."""
    for queued, name in ((1100, "a"), (1300, "b")):
        assert first(request(), {"a": holding(1, queued_tokens=queued), "b": IDLE}, 0.0) == name
    both = {"a": holding(1, queued_tokens=1), "b": holding(1)}
    assert first(request(), both, 0.0) == "b"


def test_a_document_gets_no_second_replica_where_that_one_has_much_to_do_too():
    """Each of the requests there would wait for 4 seconds more."""
    one = holding(1, rows=8, waiting=4, queued_tokens=1500)
    assert first(request(1), {"a": one, "b": IDLE}, 0.0) == "b"
    for waiting, name in ((0, "b"), (4, "a")):
        assert first(request(1), {"a": one, "b": replace(IDLE, rows=1, waiting=waiting)}, 0.0) == name


def test_a_miss_goes_to_the_least_loaded_replica():
    loads = {
        "a": replace(IDLE, rows=1, queued_tokens=900),
        "b": replace(IDLE, rows=1),
        "c": replace(IDLE, rows=8, waiting=9),
    }
    assert router().rank(request(), loads, 0.0) == ["b", "a", "c"]


def test_one_overloaded_replica_does_not_end_affinity_elsewhere():
    loads = {
        "hot": replace(IDLE, rows=8, waiting=100, queued_tokens=10**6),
        "a": holding(1),
        "b": holding(2),
        "c": IDLE,
    }
    assert first(request(1), loads, 0.0) == "a"
    assert first(request(2), loads, 0.0) == "b"


def test_what_left_memory_is_not_looked_for_any_more():
    """Reports replace each other, so a router keeps no more than the replicas do."""
    one = router()
    for number in range(50):
        reports = {"a": holding(number, counter=number), "b": replace(IDLE, counter=number)}
        one.rank(request(number), reports, float(number))
    assert len(one._resident._masks) == 100
    reports = {"a": holding(50, counter=50), "b": replace(IDLE, counter=50, free_blocks=101)}
    assert one.rank(request(3), reports, 50.0)[0] == "b"


def test_prompts_match_by_whole_blocks_of_tokens():
    """Not by characters: two prompts that differ in their first token have nothing in common."""
    tokens = [7] * 400
    near = RoutedRequest(440, tuple(block_hashes([8, *tokens[1:]], 4)))
    reports = {"a": replace(IDLE, resident=tuple(block_hashes(tokens, 4)), queued_tokens=1), "b": IDLE}
    assert first(near, reports, 0.0) == "b"
    assert first(RoutedRequest(440, tuple(block_hashes([*tokens[:396], 8, 8, 8, 8], 4))), reports, 0.0) == "a"


def test_a_burst_about_one_document_stays_together_and_other_ones_spread():
    reports = dict.fromkeys("abcd", IDLE)
    one, places = router(), []
    for _ in range(3):
        routed = request(1)
        places.append(one.rank(routed, reports, 0.0)[0])
        one.sent(routed, places[-1])
    assert len(set(places)) == 1
    one = router()
    for number in range(8):
        routed = request(number)
        places.append(one.rank(routed, reports, 0.0)[0])
        one.sent(routed, places[-1])
    assert set(Counter(places[3:]).values()) == {2}


def test_what_was_sent_counts_until_the_second_report_behind_it():
    one, routed = router(), request(1)
    one.rank(routed, {"a": replace(IDLE, counter=1), "b": replace(IDLE, counter=1, free_blocks=0)}, 0.0)
    one.sent(routed, "a")
    for counter, place in ((1, "b"), (2, "b"), (3, "a")):
        reports = {"a": replace(IDLE, counter=counter), "b": replace(IDLE, counter=counter, free_blocks=0)}
        assert one.rank(request(2), reports, counter / 2)[0] == place


def test_a_report_that_has_the_new_blocks_of_a_request_counts_it_once():
    one, routed = router(), request(1)
    one.rank(routed, {"a": replace(IDLE, counter=1), "b": IDLE}, 0.0)
    one.sent(routed, "a")
    told = holding(1, counter=2, rows=1, queued_tokens=440)
    # Counted twice, these 440 tokens would be more than 600.
    busy = replace(IDLE, counter=2, rows=1, queued_tokens=600)
    assert one.rank(request(2), {"a": told, "b": busy}, 0.5)[0] == "a"


def test_a_request_that_ended_counts_no_more():
    one, routed, reports = router(), request(1), {"a": IDLE, "b": replace(IDLE, free_blocks=0)}
    one.rank(routed, reports, 0.0)
    one.sent(routed, "a")
    assert one.rank(request(2), reports, 0.0)[0] == "b"
    one.completed(routed, "a")
    assert one.rank(request(2), reports, 0.0)[0] == "a"


def test_old_news_are_believed_less_and_then_not_at_all():
    """Until 2 seconds it is fresh, and from 10 on nothing is known of the replica."""
    old, busy = holding(1), replace(IDLE, queued_tokens=100, resident=document(1)[:50])
    one, places = router(), []
    for counter, now in enumerate((0.0, 1.9, 4.0, 9.0, 11.0)):
        reports = {"old": old, "busy": replace(busy, counter=counter)}
        places.append(one.rank(request(1), reports, now)[0])
    assert places == ["old", "old", "old", "busy", "busy"]


def test_a_report_that_came_again_stays_old():
    one = router()
    same = {"a": ReplicaReport.from_dict(holding(1).to_dict()), "b": replace(IDLE, queued_tokens=100)}
    assert one.rank(request(1), same, 0.0)[0] == "a"
    again = {"a": ReplicaReport.from_dict(holding(1).to_dict()), "b": replace(same["b"], counter=1)}
    assert one.rank(request(1), again, 30.0)[0] == "b"


def test_a_restarted_replica_is_believed_though_it_counts_from_one():
    one = router()
    one.rank(request(1), {"a": replace(IDLE, counter=9, time=5.0), "b": IDLE}, 0.0)
    restarted = {"a": holding(1, counter=9, time=60.0), "b": replace(IDLE, counter=3)}
    assert one.rank(request(1), restarted, 60.0)[0] == "a"


def test_a_dead_replica_drops_out_and_a_new_one_has_nothing_of_it():
    one = router()
    assert one.rank(request(1), {"a": holding(1), "b": IDLE}, 0.0)[0] == "a"
    one.sent(request(2), "a")
    assert one.rank(request(1), {"b": IDLE}, 0.1) == ["b"]
    ranked = one.rank(request(1), {"b": IDLE, "c": replace(IDLE, free_blocks=0)}, 0.2)
    assert ranked == ["b", "c"]
    assert one._resident._masks == {}
    one.sent(request(1), "a")
    one.completed(request(1), "a")


def test_where_nothing_is_known_the_less_used_of_two_random_replicas_is_first():
    one, sent = router(), Counter()
    replicas = dict.fromkeys("abcdefgh")
    for number in range(400):
        routed = request(number)
        place = one.rank(routed, replicas, 0.0)[0]
        one.sent(routed, place)
        sent[place] += 1
    assert max(sent.values()) - min(sent.values()) < 10


def test_an_unknown_replica_comes_behind_idle_ones_and_before_overloaded_ones():
    assert router().rank(request(1), {"new": None, "a": IDLE, "b": replace(IDLE, queued_tokens=900)}, 0.0)[0] == "a"
    assert first(request(1), {"new": None, "a": replace(IDLE, rows=8, waiting=5, prefill_tokens_per_s=1.0)}, 0.0) == "a"


def test_a_stored_beginning_is_fetched_where_that_is_faster():
    """A token takes 10 ms to compute, and 1 ms to fetch: 400 tokens on a second replica cost 0.4 seconds."""
    loaded = holding(1, queued_tokens=200)
    assert first(request(1), {"a": loaded, "b": IDLE}, 0.0) == "a"
    assert first(request(1), {"a": replace(loaded, stored=document(1)), "b": IDLE}, 0.0) == "b"
    assert first(request(1, stored_tokens=400), {"a": loaded, "b": IDLE}, 0.0) == "b"
    slow = replace(IDLE, bytes_per_token=1e6)
    assert first(request(1, stored_tokens=400), {"a": loaded, "b": slow}, 0.0) == "a"


def test_blocks_of_another_size_are_refused():
    with pytest.raises(HeteroKVError, match="blocks of 16 tokens"):
        first(request(1), {"a": replace(IDLE, block_size=16)}, 0.0)


def test_nobody_is_ranked_where_nobody_is():
    assert router().rank(request(1), {}, 0.0) == []


REPORTS = st.builds(
    lambda numbers, stored, **loads: replace(holding(*numbers, **loads), stored=document(stored)),
    numbers=st.lists(st.integers(0, 3), max_size=2, unique=True),
    stored=st.integers(0, 5),
    rows=st.integers(0, 8),
    waiting=st.integers(0, 5),
    queued_tokens=st.integers(0, 2000),
    free_blocks=st.integers(0, 3),
    prefill_tokens_per_s=st.sampled_from([None, 50.0, 100.0, 400.0]),
    decode_step_s=st.sampled_from([None, 0.01, 0.1]),
)
REPLICAS = st.dictionaries(st.sampled_from("abcdefgh"), st.none() | REPORTS, max_size=8)


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(REPLICAS, st.integers(0, 5), st.floats(0, 5), st.booleans()), max_size=6))
def test_a_ranking_has_every_live_replica_once(steps):
    one, now = router(), 0.0
    for replicas, number, later, is_sent in steps:
        now += later
        routed = request(number)
        ranked = one.rank(routed, replicas, now)
        assert sorted(ranked) == sorted(replicas)
        if is_sent and ranked:
            one.sent(routed, ranked[0])


@given(
    replicas=REPLICAS.filter(lambda replicas: any(replicas.values())), number=st.integers(0, 5), data=st.data(),
    rows=st.integers(0, 4), waiting=st.integers(0, 9), queued=st.integers(0, 5000),
)  # fmt: skip
def test_more_load_never_improves_a_rank(replicas, number, data, rows, waiting, queued):
    name = data.draw(st.sampled_from(sorted(name for name, report in replicas.items() if report is not None)))
    before, routed = replicas[name], request(number)
    more = replace(
        before, rows=before.rows + rows, waiting=before.waiting + waiting, queued_tokens=before.queued_tokens + queued
    )
    ranks = [router().rank(routed, reports, 0.0).index(name) for reports in (replicas, {**replicas, name: more})]
    assert ranks[0] <= ranks[1]


@given(replicas=REPLICAS, number=st.integers(0, 3), data=st.data())
def test_having_the_document_never_worsens_a_rank(replicas, number, data):
    known = sorted(name for name, report in replicas.items() if report is not None)
    if not known:
        return
    name = data.draw(st.sampled_from(known))
    has = replace(replicas[name], resident=replicas[name].resident + document(number))
    others = {**replicas, name: has}
    ranks = [router().rank(request(number), reports, 0.0).index(name) for reports in (replicas, others)]
    assert ranks[0] >= ranks[1]


def test_a_beginning_that_was_sent_and_is_not_kept_is_forgotten():
    one, routed = router(), request(1)
    one.rank(routed, {"a": IDLE, "b": IDLE}, 0.0)
    one.sent(routed, "a")
    one.completed(routed, "a")
    for counter in (1, 2):
        reports = {"a": replace(IDLE, counter=counter), "b": replace(IDLE, counter=counter, free_blocks=101)}
        ranked = one.rank(request(1), reports, counter / 2)
    assert ranked == ["b", "a"]
    assert one._resident._masks == {}
