"""Flags of a cluster, and how many replicas it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetero_kv.errors import ConfigError
from hetero_kv.server.checked_flags import checked
from hetero_kv.server.cluster.autoscaling import LOAD, load, replicas_for_load
from hetero_kv.server.command import add_flags
from hetero_kv.serving.cluster.replica_report import ReplicaReport
from hetero_kv.settings.flags import FlagParser


def parsed(**values):
    parser = FlagParser("hetero-kv serve", "")
    add_flags(parser)
    return parser.parse(parser.words(values))


def test_flags_as_values_are_those_of_the_command_line():
    flags = parsed(
        config=["quest", "dense"], insecure=True, log_prompts=False, cluster=True, trust_remote_code=False, replicas=3,
        max_seq_len=4096,
    )  # fmt: skip
    found = checked(flags)
    assert flags.rules == ["quest", "dense"]
    assert (found.settings.insecure, found.settings.log_prompts, flags.trust_remote_code) == (True, False, False)
    assert found.cluster.replicas == 3
    with pytest.raises(ConfigError, match="unknown flag '--replica_count'"):
        parsed(replica_count=2)
    with pytest.raises(ConfigError, match=r"model is .*; give a text"):
        parsed(model={"a": 1})


def test_a_flag_of_a_cluster_without_a_cluster_is_refused():
    with pytest.raises(ConfigError, match="--replicas is for a cluster; give --cluster too"):
        checked(parsed(replicas=2))
    assert checked(parsed()).cluster is None
    with pytest.raises(ConfigError, match="context_cache off"):
        checked(parsed(cluster=True, prefill_replicas=1, context_cache="off"))
    with pytest.raises(ConfigError, match="an address gets what is saved some time later"):
        checked(parsed(cluster=True, prefill_replicas=1, context_folder="memory://contexts"))
    with pytest.raises(ConfigError, match=r"replica_cpus is 0\.5"):
        checked(parsed(cluster=True, replica_cpus=0.5))


def test_flags_of_contexts_without_effect_are_refused():
    with pytest.raises(ConfigError, match="--context_folder has no effect where context_cache is off; leave one out"):
        checked(parsed(context_cache="off", context_folder="contexts"))
    with pytest.raises(ConfigError, match="--context_wait_s has no effect on a folder of this machine; leave it out"):
        checked(parsed(context_wait_s=2))
    assert checked(parsed(context_wait_s=2, context_folder="memory://contexts")).contexts.context_wait_s == 2
    assert checked(parsed(context_cache="off")).contexts.context_cache == "off"


def test_a_server_whose_address_is_unknown_needs_keys_or_is_told_to_be_open():
    with pytest.raises(ConfigError, match=r"proxies may be reached from other machines, and there is no --api_key"):
        checked(parsed(cluster=True), listens=False)
    assert checked(parsed(cluster=True, insecure=True), listens=False).settings.insecure
    assert checked(parsed(cluster=True, api_key=["team:secret-key"]), listens=False).keys


@pytest.mark.parametrize(
    ("loads", "replicas"), [([0.0, 0.0], 1), ([0.75], 1), ([1.0], 2), ([1.0, 1.0], 3), ([4.0], 6), ([0.2, 0.1, 0.1], 1)]
)
def test_there_are_so_many_replicas_that_each_is_three_quarters_busy(loads, replicas):
    metrics = {LOAD: {str(number): each for number, each in enumerate(loads)}}
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=9)
    assert replicas_for_load(context)[0] == replicas
    assert replicas_for_load(SimpleNamespace(aggregated_metrics=None, target_num_replicas=9))[0] == 9


def test_a_long_prompt_is_load_though_rows_are_free():
    report = ReplicaReport(64, rows=1, row_limit=8, queued_tokens=60_000, prefill_tokens_per_s=1000.0)
    assert load(report) == 2.0
    assert load(ReplicaReport(64, rows=6, row_limit=8, waiting=2)) == 1.0
