"""With `attend_on: gpu` rows of several lengths decode by one graph, which serves all rows of a bucket."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.adapter.experts_in_dram import ExpertsInDram
from hetero_kv.adapter.footprint import RESIDENT
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.families.retrieval.footprint import WINDOWS
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.planning.footprint import Footprint
from hetero_kv.serving.forward import ModelForward
from tests.operators.resident_models import (
    BLOCK,
    CLUSTERS,
    bytes_on_gpu,
    injected,
    llama_on_gpu,
    random_tokens,
    rules,
    told,
)
from tests.support.devices import model_on
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
#: Layers with all tokens and with blocks; with a shared choice; nothing but windows; queries that go to the CPU; single
#: tokens of all blocks, of candidates and of clusters; and blocks and tokens that stay packed, the latter with key
#: offsets.
_SIZES = {"block_size": 16, "sink_tokens": 16, "local_windows_len": 16, "max_dense_blocks": 0, "min_blocks": 1}
WAYS = {
    "quest": {},
    "ktransformers": {"recipe": "ktransformers"},
    "adaptive": {"recipe": "adaptive", **_SIZES},
    "infllm": {"recipe": "infllm"},
    "dense": {"top_k_blocks": "all"},
    "streaming": {"top_k_blocks": 0},
    "packed": {"kv_type": "Q8_0", "block_size": 16, "top_k_blocks": 2},
    "adaptive_lean": {"recipe": "adaptive_lean", **_SIZES},
    "packed tokens": {"recipe": "adaptive", "kv_type": "Q4_0", **_SIZES},
    "retroinfer": CLUSTERS,
}
FIRST = ["quest", "ktransformers", "adaptive", "retroinfer"]


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu(head_dim=32)
    # Caches unlock their memory while the GPU is there.
    gc.collect()


class Conversations:
    """Conversations of one store, each with the tokens that it continues with."""

    def __init__(self, model, *lengths, **settings):
        injected(model, cuda_graphs="on", **settings)
        self.forward = ModelForward(model)
        self.store = model.hetero_kv_injection.common_store(400, 8)
        self.lengths = lengths
        self.tokens = {length: random_tokens(length + 40, seed=length)[0].tolist() for length in lengths}
        self.caches, self.logits = {}, {length: [] for length in lengths}

    def join(self, *lengths):
        for length in lengths:
            self.caches[length] = self.forward.new_cache(self.store)
            self.logits[length].append(self.forward.prompt(self.caches[length], self.tokens[length][:length]))

    def decode(self, *lengths, tokens=1):
        """Decode together, each its next tokens."""
        for _ in range(tokens):
            caches = [self.caches[length] for length in lengths]
            following = [self.tokens[length][self.caches[length].lengths[0]] for length in lengths]
            for length, logits in zip(lengths, self.forward.decode(caches, following), strict=True):
                self.logits[length].append(logits)

    def expected(self, model, length, **settings):
        """The logits of one of them by itself, with the CPU."""
        eject(model) if hasattr(model, "hetero_kv_injection") else None
        count = len(self.logits[length])
        cache = injected(model, "cpu", **settings)
        found = told(model, cache, torch.tensor([self.tokens[length][: length + count - 1]]), prompt=length)
        eject(model)
        return torch.cat(found)


@pytest.mark.parametrize("way", with_slow(list(WAYS), slow=[each for each in WAYS if each not in FIRST]))
def test_conversations_join_and_leave_without_a_capture(llama, captures, way):
    settings = WAYS[way]
    talks = Conversations(llama, 40, 57, 75, 90, 61, **settings)
    talks.join(40, 57, 75)
    # Buckets of four rows and of two.
    talks.decode(40, 57, 75, tokens=4)
    talks.decode(40, 57, tokens=4)
    seen = len(captures)
    assert seen == 2
    talks.join(90, 61)
    talks.decode(90, 40, 75, 61, tokens=2)
    talks.decode(57, 61, tokens=2)
    # Blocks close meanwhile, in some rows and not in others.
    talks.decode(61, 75, 40, tokens=BLOCK + 1)
    talks.decode(90, 57, tokens=2)
    assert len(captures) == seen
    for length in talks.lengths:
        found = torch.stack(talks.logits[length]).cpu()
        torch.testing.assert_close(found, talks.expected(llama, length, **settings), **CLOSE)


def test_a_conversation_that_is_gone_leaves_its_row_to_another(llama, captures):
    talks = Conversations(llama, 40, 57, 75, 44)
    talks.join(40, 57, 75)
    talks.decode(40, 57, 75, tokens=5)
    del talks.caches[57]
    gc.collect()
    talks.join(44)
    seen = len(captures)
    talks.decode(44, 40, 75, tokens=3)
    assert len(captures) == seen
    for length in (40, 75, 44):
        found = torch.stack(talks.logits[length]).cpu()
        torch.testing.assert_close(found, talks.expected(llama, length), **CLOSE)


def test_forks_and_crops_decode_by_the_graph_that_is_there(llama, captures):
    talks = Conversations(llama, 40, 75)
    talks.join(40, 75)
    talks.decode(40, 75, tokens=5)
    seen, first = len(captures), talks.caches[75]
    talks.caches[75] = first.fork()
    talks.decode(75, 40, tokens=2)
    # Into the Context, whose last blocks come again.
    for length in (40, 75):
        talks.caches[length].crop(-4)
        del talks.logits[length][-4:]
    talks.decode(75, 40, tokens=6)
    assert len(captures) == seen
    for length in (40, 75):
        found = torch.stack(talks.logits[length]).cpu()
        torch.testing.assert_close(found, talks.expected(llama, length), **CLOSE)


def test_a_token_that_fails_is_undone_in_every_row(llama, monkeypatch):
    talks = Conversations(llama, 40, 57, 75)
    talks.join(40, 57, 75)
    talks.decode(40, 57, 75, tokens=5)
    lengths, stored = [each.lengths for each in talks.caches.values()], []
    with monkeypatch.context() as patch:

        def refuse(self, largest):
            stored.append(self)
            # Of the last row, behind the others.
            if len(stored) == 3:
                raise HeteroKVError("on purpose")

        patch.setattr(RetrievalLayer, "require_storable", refuse)
        with pytest.raises(HeteroKVError, match="on purpose"):
            talks.decode(40, 57, 75)
    assert [each.lengths for each in talks.caches.values()] == lengths
    talks.decode(75, 40, 57, tokens=3)
    for length in talks.lengths:
        found = torch.stack(talks.logits[length]).cpu()
        torch.testing.assert_close(found, talks.expected(llama, length), **CLOSE)


def test_rows_that_lie_in_another_dtype_are_refused(llama):
    talks = Conversations(llama, 40, 57)
    talks.join(40, 57)
    talks.decode(40, tokens=5)
    layer = talks.caches[57].layers[1]
    layer.window.values = layer.window.values.double()
    with pytest.raises(HeteroKVError, match=r"layer 1: sequences of one store .* dtypes"):
        talks.decode(57)


@pytest.mark.parametrize("way", with_slow(["quest", "ktransformers", "adaptive"], slow=["ktransformers"]))
@pytest.mark.parametrize("rows", [3, 4])
def test_a_token_of_several_rows_takes_two_launches_and_one_wait(gpu, llama, way, rows):
    talks = Conversations(llama, 40, 57, 75, 90, **WAYS[way])
    lengths = talks.lengths[:rows]
    talks.join(*lengths)
    caches = [talks.caches[length] for length in lengths]
    tokens = [3] * rows
    for place in range(BLOCK + 6):
        gpu.record.clear()
        found = talks.forward.likeliest(caches, tokens)
        if place >= 4:
            assert all(isinstance(each, Likeliest) for each in found)
            # The tokens' ids are copied to where the graph reads them.
            assert [each.name for each in gpu.record.launches] == ["copy_", "graph"]
            assert len(gpu.record.waits) == 1
            assert not gpu.record.pageable
        tokens = [int(each.argmax()) if isinstance(each, torch.Tensor) else each.token for each in found]
    expected = {}
    for length in lengths:
        cache = HeteroCache(llama)
        logits = talks.forward.prompt(cache, talks.tokens[length][:length])
        chosen = [3]
        for _ in range(BLOCK + 6):
            logits = talks.forward.decode([cache], chosen[-1:])
            chosen.append(int(logits[0].argmax()))
        expected[length] = chosen[-1]
    assert tokens == [expected[length] for length in lengths]


@torch.no_grad()
def test_padded_rows_of_one_cache_decode_by_one_graph(gpu, llama, captures):
    lengths, tokens, count = (70, 52, 33), random_tokens(80, rows=3), 9
    cache = injected(llama, cuda_graphs="on")
    padded = torch.zeros(3, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, length in enumerate(lengths):
        padded[row, -length:], mask[row, -length:] = tokens[row, :length], 1
    llama(padded.to("cuda"), attention_mask=mask.to("cuda"), past_key_values=cache)
    found = []
    for place in range(count):
        following = torch.stack([tokens[row, length + place] for row, length in enumerate(lengths)])[:, None]
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
        following = following.to("cuda")
        gpu.record.clear()
        output = llama(following, attention_mask=mask, past_key_values=cache)
        if place >= 4:
            # The logits are copied, because the next token overwrites them.
            assert [each.name for each in gpu.record.launches] == ["copy_", "graph", "clone"]
            assert len(gpu.record.waits) == 1
        found.append(output.logits[:, -1].cpu())
    assert len(captures) == 1
    eject(llama)
    for row, length in enumerate(lengths):
        cache = injected(llama, "cpu")
        expected = told(llama, cache, tokens[row : row + 1, : length + count], prompt=length)[1:]
        eject(llama)
        torch.testing.assert_close(torch.stack([each[row] for each in found]), torch.cat(expected), **CLOSE)


@pytest.mark.parametrize("way", ["quest", "ktransformers", "adaptive", "dense", "packed", "retroinfer"])
def test_tables_and_tokens_on_their_way_are_planned(llama, way):
    talks = Conversations(llama, 40, 57, 75, 90, 61, **WAYS[way])
    talks.join(*talks.lengths)
    for rows in (1, 2, 3, 5):
        talks.decode(*talks.lengths[:rows], tokens=2)
    (of_layers, of_tokens), count = bytes_on_gpu(talks.caches[40], 8), 8
    assert {each[2] for each in talks.store.device_tokens} == {1, 2, 4, 8}
    planned = Footprint.of(llama.hetero_kv_injection).memory(400, count).sizes
    # Layers that attend to everything have it in their windows.
    windows = sum(layer.window.nbytes for layer in talks.caches[40].layers)
    assert planned[RESIDENT] + planned[WINDOWS] == count * (of_layers + windows) + of_tokens


def test_the_cpu_computes_experts_for_the_rows_in_use(gpu, captures, monkeypatch):
    lengths, tokens, seen, computed = (40, 57, 75), random_tokens(90, rows=3), [], ExpertsInDram.on_cpu

    def noted(self, out, dtype, rows, routing):
        seen.append(len(rows))
        computed(self, out, dtype, rows, routing)

    monkeypatch.setattr(ExpertsInDram, "on_cpu", noted)
    found = {}
    for where in ("dram", "gpu"):
        model = model_on(torch.device("cuda", 0), tiny_model("qwen3_moe"))
        inject(model, rules(cuda_graphs="on" if where == "dram" else "off", engine={"experts_device": where}))
        forward, store = ModelForward(model), model.hetero_kv_injection.common_store(400, 4)
        caches = [forward.new_cache(store) for _ in lengths]
        for cache, length, row in zip(caches, lengths, tokens, strict=True):
            forward.prompt(cache, row[:length].tolist())
        for place in range(6):
            following = [int(row[length + place]) for row, length in zip(tokens, lengths, strict=True)]
            seen.clear()
            found.setdefault(where, []).append(torch.stack(list(forward.decode(caches, following))).cpu())
            assert seen == [3] * len(model.model.layers) * (where == "dram")
        del caches, cache, store
        eject(model)
        # Memory is unlocked while the GPU is there.
        gc.collect()
    assert captures
    torch.testing.assert_close(torch.stack(found["dram"]), torch.stack(found["gpu"]), **CLOSE)


def test_caches_of_several_stores_decode_together(llama):
    lengths, tokens = (40, 57, 75), random_tokens(90, rows=3)
    caches = [injected(llama, cuda_graphs="on"), HeteroCache(llama), HeteroCache(llama)]
    forward, found = ModelForward(llama), {length: [] for length in lengths}
    for cache, length, row in zip(caches, lengths, tokens, strict=True):
        found[length].append(forward.prompt(cache, row[:length].tolist()))
    for place in range(6):
        following = [int(row[length + place]) for row, length in zip(tokens, lengths, strict=True)]
        for length, logits in zip(lengths, forward.decode(caches, following), strict=True):
            found[length].append(logits)
    del caches, cache
    eject(llama)
    for length, row in zip(lengths, tokens, strict=True):
        expected = told(llama, injected(llama, "cpu"), row[None, : length + 6], prompt=length)
        eject(llama)
        torch.testing.assert_close(torch.stack(found[length]).cpu(), torch.cat(expected), **CLOSE)
