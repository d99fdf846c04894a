"""Blocks that lie in files take no memory, and are read ahead of attention."""

from __future__ import annotations

import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_kv import HeteroCache
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.cpu_ops.step_contract import TOUCHED
from hetero_kv.engine import reservations
from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.reservations import reserved_by_others
from hetero_kv.engine.resident_prefix import ResidentPrefix
from hetero_kv.errors import OutOfMemoryError
from hetero_kv.planning import plan
from hetero_kv.store import read_ahead
from tests.contexts.conversations import goes_on
from tests.contexts.long_documents import document, reader

pytestmark = pytest.mark.usefixtures("one_thread")

ROOM = 1300


@pytest.fixture(scope="module")
def model():
    return reader()


@pytest.fixture(scope="module")
def told(model, tmp_path_factory):
    """A cache, and the file of its context."""
    path = tmp_path_factory.mktemp("contexts") / "document"
    cache, ids = document(model)
    cache.save(path, [ids])
    return cache, path


@pytest.fixture
def little_memory(model, told, monkeypatch):
    """Free memory for half of the blocks and the rest of a context, in addition to the document's cache."""
    # Caches of other tests reserve nothing.
    monkeypatch.setattr(reservations, "_live", weakref.WeakSet([told[0].groups[0].store]))
    planned = plan.Plan.of(model.hetero_kv_injection, resident=ResidentPrefix(told[0].lengths[0]))
    needed = planned.dram_needed(ROOM) - told[0].dram_bytes / 2
    free = round((needed + reserved_by_others(None).size) / (1 - plan.RESERVE))
    monkeypatch.setattr(plan, "free_dram", lambda: free)
    monkeypatch.setattr(plan, "limits_addresses", lambda: False)
    return free


def mapped_and_private(path):
    """Bytes of memory that a file is laid over, and how many of these are this process's own: it wrote there."""
    mapped = private = 0
    counts = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(f" {path}")
        elif counts and line.startswith(("Size:", "Anonymous:")):
            size = 1024 * int(line.split()[1])
            mapped, private = mapped + size * line.startswith("Size"), private + size * line.startswith("Anon")
    return mapped, private


def test_a_context_that_is_larger_than_memory_goes_on_as_another(model, told, little_memory):
    cache, path = told
    with pytest.raises(OutOfMemoryError, match="max_seq_len is 1300"):
        HeteroCache(model, ROOM)
    loaded = HeteroCache.load(path, model, max_seq_len=ROOM)
    assert loaded.lengths == cache.lengths
    assert torch.equal(goes_on(model, loaded, [0], 3), goes_on(model, cache.fork(), [0], 3))
    mapped, private = mapped_and_private(path)
    assert mapped > 0.8 * cache.dram_bytes
    assert private < 0.1 * mapped
    # Without the file its memory is planned as any other.
    loaded.reset()
    with pytest.raises(OutOfMemoryError, match="max_seq_len is 1300"):
        goes_on(model, loaded, [0], 3)


def test_where_addresses_are_limited_mapped_pages_count(model, told, little_memory, monkeypatch):
    monkeypatch.setattr(plan, "limits_addresses", lambda: True)
    # The addresses of the document's own cache are taken.
    monkeypatch.setattr(plan, "free_dram", lambda: little_memory - reserved_by_others(None).size)
    with pytest.raises(OutOfMemoryError, match="max_seq_len is 1300"):
        HeteroCache.load(told[1], model, max_seq_len=ROOM)


def test_damaged_blocks_are_recomputed_only_where_they_fit(model, told, little_memory, tmp_path):
    cache, path = told
    content, at = (
        bytearray(path.read_bytes()),
        path.read_bytes().index(cache.layers[0].pool.values[3].numpy().tobytes()),
    )
    content[at] ^= 1
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ContextError, match=r"block 3 of .* is damaged.* it does not fit into memory to be recomputed"):
        HeteroCache.load(tmp_path / "c", model, max_seq_len=ROOM)


@pytest.fixture
def read_ranges(monkeypatch):
    """The ranges of memory, [address, bytes], that the system is told to read ahead."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(read_ahead, "will_need", lambda *args: ranges.append(args))
    return ranges


def blocks_in(ranges, array):
    """The blocks of a pool's array that lie in ranges of memory."""
    size, begin = array[0].nbytes, array.data_ptr()
    found = [
        np.arange((start - begin) // size, (start - begin + length) // size)
        for start, length in ranges
        if begin <= start < begin + array.nbytes
    ]
    return set(np.concatenate(found).tolist()) if found else set()


def decoded(model, cache, token):
    with torch.no_grad():
        return model(torch.tensor([[token]]), past_key_values=cache).logits


@pytest.fixture
def no_waits(monkeypatch):
    """Pages that this process has had to wait for: a number that the test sets."""
    waits = {"ru_majflt": 0}

    class Usage:
        @property
        def ru_majflt(self):
            return waits["ru_majflt"]

    monkeypatch.setattr(read_ahead.resource, "getrusage", lambda who: Usage())
    return waits


def test_the_blocks_that_a_token_chooses_are_read_before_it_attends_to_them(model, told, read_ranges, no_waits):
    cache, path = told
    loaded, fork = HeteroCache.load(path, model, verify=False), cache.fork()
    read_ranges.clear()
    assert torch.equal(decoded(model, loaded, 5), decoded(model, fork, 5))
    for layer in loaded.layers:
        # Three that are chosen by each head, the first, and those at the end: of 300.
        blocks = blocks_in(read_ranges, layer.pool.keys)
        assert blocks == blocks_in(read_ranges, layer.pool.values)
        assert 0 in blocks
        assert 4 <= len(blocks) <= 12
    read_ranges.clear()
    for token in range(6, 6 + 2 * read_ahead._QUIET_LOOKS):
        assert torch.equal(decoded(model, loaded, token), decoded(model, fork, token))
        if token == 6 + read_ahead._QUIET_LOOKS:
            read_ranges.clear()
    assert read_ranges == []
    no_waits["ru_majflt"] += 1
    assert torch.equal(decoded(model, loaded, 7), decoded(model, fork, 7))
    assert read_ranges != []


@pytest.mark.slow
def test_blocks_of_16_tokens_in_few_bits_are_mapped_and_go_on_as_they_were(tmp_path):
    blocks = {"block_size": 16, "sink_tokens": 16, "local_windows_len": 16, "top_k_blocks": 4}
    model = reader({"head_dim": 32}, **blocks, key_type="Q4_0", value_type="Q8_0")
    cache, ids = document(model)
    cache.save(tmp_path / "document", [ids])
    loaded = HeteroCache.load(tmp_path / "document", model, verify=False)
    assert mapped_and_private(tmp_path / "document")[0] > 0
    assert torch.equal(goes_on(model, loaded, [0], 3), goes_on(model, cache.fork(), [0], 3))


@pytest.mark.parametrize("head_select_mode", ["SHARED", "SEPARATE"])
def test_of_a_preselected_context_the_candidates_alone_are_scored(
    head_select_mode, tmp_path, read_ranges, no_waits, monkeypatch
):
    model = reader(preselect_block=True, preselect_block_count=9, head_select_mode=head_select_mode)
    cache, ids = document(model)
    cache.save(tmp_path / "document", [ids])
    loaded, fork = HeteroCache.load(tmp_path / "document", model, verify=False), cache.fork()
    numbers, chosen = [], []
    call, rehearsed = RetrievalStep.__call__, RetrievalStep.rehearsed

    def noted(step, *args):
        numbers.append(args[7].shape[2])
        return rehearsed(step, *args)

    monkeypatch.setattr(RetrievalStep, "rehearsed", noted)

    def stepped(step, *args):
        result = call(step, *args)
        chosen.append(args[6].tolist())
        return result

    monkeypatch.setattr(RetrievalStep, "__call__", stepped)
    expected = decoded(model, fork, 5)
    assert torch.equal(decoded(model, loaded, 5), expected)
    # Those that were preselected; fewer are attended to.
    assert numbers == [9] * 3
    assert chosen[3:] == chosen[:3]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_mass": 0.9, "head_select_mode": "SEPARATE", "min_blocks": 2},
        {"target_mass": 0.5, "layer_step": 2},
    ],
)
def test_blocks_that_are_chosen_by_estimates_are_read_before_too(
    settings, tmp_path, read_ranges, no_waits, monkeypatch
):
    model = reader(group_reduce="softmax", residual_attention="estimate", **settings)
    cache, ids = document(model)
    cache.save(tmp_path / "document", [ids])
    loaded, fork = HeteroCache.load(tmp_path / "document", model, verify=False), cache.fork()
    read_ranges.clear()
    attended, call = [], RetrievalStep.__call__

    def noted(step, *args):
        largest = call(step, *args)
        (_, first, end), (table, _, positions) = args[3][:, 0], args[4:7]
        chosen = (first + positions[positions >= 0]).tolist()
        attended.append({*range(first), *chosen, *range(end, table.shape[1])})
        return largest

    monkeypatch.setattr(RetrievalStep, "__call__", noted)
    expected = decoded(model, fork, 5)
    of_layers = list(attended)
    assert torch.equal(decoded(model, loaded, 5), expected)
    for layer, places in zip(loaded.layers, of_layers, strict=True):
        ids = loaded.sequences[0].tables[layer.layout].ids
        assert blocks_in(read_ranges, layer.pool.keys) == {int(ids[place]) for place in places}
        assert blocks_in(read_ranges, layer.pool.values) == blocks_in(read_ranges, layer.pool.keys)
        assert 4 < len(places) < 20


@pytest.mark.parametrize("settings", [{}, {"layer_step": 2}, {"head_select_mode": "SEPARATE"}])
def test_of_single_tokens_those_blocks_are_read_before_that_hold_some(
    settings, tmp_path, read_ranges, no_waits, monkeypatch
):
    """The other blocks hold garbage until they are read."""
    means = {
        "representative_type": "MEAN",
        "group_reduce": "softmax",
        "residual_attention": "estimate",
        "min_blocks": 1,
    }
    blocks = {"block_size": 16, "sink_tokens": 16, "local_windows_len": 16, "top_k_blocks": 16, "kv_type": "FP16"}
    model = reader(**means, **blocks, rerank="all", attend_to="tokens", target_mass=0.98, **settings)
    for layer in model.model.layers:
        # So few tokens have most of the attention that not all candidates hold some.
        layer.self_attn.q_proj.weight.data *= 3
    cache, ids = document(model)
    cache.save(tmp_path / "document", [ids])
    loaded, fork = HeteroCache.load(tmp_path / "document", model, verify=False), cache.fork()
    expected = decoded(model, fork, 5)
    read_ranges.clear()
    counts, call = [], RetrievalStep.__call__

    def with_what_was_asked_for(step, *args):
        (layer,) = (layer for layer in loaded.layers if layer.token_step is step)
        known = blocks_in(read_ranges, layer.pool.keys)
        assert known == blocks_in(read_ranges, layer.pool.values)
        (_, first, end), table = args[3][:, 0], args[4]
        context = set(table[0, first:end].tolist())
        unknown = list(context - known)
        layer.pool.keys[unknown], layer.pool.values[unknown] = torch.nan, torch.nan
        largest = call(step, *args)
        counts.append((len(context & known), args[-1].taken[0, TOUCHED], len(np.unique(args[6][args[6] >= 0]))))
        return largest

    monkeypatch.setattr(RetrievalStep, "__call__", with_what_was_asked_for)
    assert torch.equal(decoded(model, loaded, 5), expected)
    assert len(counts) == 3
    read, touched, candidates = np.transpose(counts)
    assert (read <= touched).all()
    assert read.sum() < 0.9 * candidates.sum()


def test_a_question_has_all_blocks_read_a_layer_ahead(model, told, read_ranges, no_waits):
    loaded = HeteroCache.load(told[1], model, verify=False)
    read_ranges.clear()
    whole = set(range(len(loaded.sequences[0].tables[loaded.layers[0].layout].ids) - 1))
    seen = []
    loaded.on_progress = lambda *_: seen.append(
        tuple(blocks_in(read_ranges, layer.pool.keys) >= whole for layer in loaded.layers)
    )
    goes_on(model, loaded, [0], 3)
    assert list(dict.fromkeys(seen)) == [(False, False, False), (True, True, False), (True, True, True)]
