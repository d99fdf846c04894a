"""With `attend_on: gpu` a GPU chooses blocks and attends to them: as the CPU does, and without waiting for the host."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.evals.generation import greedy
from hetero_kv.families.retrieval import resident_context
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.gpu_ops import mapped_memory
from hetero_kv.gpu_ops.resident_slots import fetch
from hetero_kv.planning.footprint import Footprint
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.sampler import LogitsError, Sampler
from hetero_kv.serving.sampling import SamplingParams
from tests.support.devices import model_on, simulated_cuda
from tests.support.simulated_cuda import Copy, Launch, SimulatedCudaError
from tests.support.simulated_cuda.graphs import CUDAGraph
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

LAYERS, BLOCK = 2, 8
ALL = 10**6


@pytest.fixture
def gpu():
    with simulated_cuda() as simulation:
        yield simulation
        gc.collect()


@pytest.fixture
def llama(gpu):
    return model_on(torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=LAYERS))


def rules(attend_on="gpu", recipe="quest", cuda_graphs="off", max_seq_len=400, **kwargs):
    """A recipe with short blocks, the settings of whose attention are these."""
    found = small_recipe(recipe, attend_on=attend_on, cuda_graphs=cuda_graphs, max_seq_len=max_seq_len)
    changed = (
        replace(rule, kwargs={**rule.kwargs, **kwargs}) if "representative_type" in rule.kwargs else rule
        for rule in found.rules
    )
    return replace(found, rules=tuple(changed))


def injected(model, *args, **settings):
    inject(model, rules(*args, **settings))
    return HeteroCache(model)


def random_tokens(count, rows=1, seed=0):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def told(model, cache, tokens, prompt=0):
    """Logits after a prompt of the first `prompt` tokens, and after each of the others."""
    parts = tokens.to("cuda").split([*[prompt] * (prompt > 0), *[1] * (tokens.shape[1] - prompt)], dim=1)
    return [model(part, past_key_values=cache).logits[:, -1].cpu() for part in parts]


def conversation(model, cache):
    """Logits of two turns, a fork, two rows, one of them, another cache and crops, with blocks that close meanwhile."""
    found = told(model, cache, random_tokens(64), prompt=60)
    found += told(model, cache, random_tokens(14, seed=1), prompt=9)
    fork = cache.fork()
    found += told(model, fork, random_tokens(1, seed=2)) + told(model, cache, random_tokens(1, seed=3))
    fork.select([0, 0])
    found += told(model, fork, random_tokens(5, rows=2, seed=4))
    fork.select([1])
    # Into the Context, whose last blocks get other tokens.
    fork.crop(-30)
    found += told(model, fork, random_tokens(28, seed=6), prompt=23)
    return torch.cat(found)


#: Two representatives, whole sequences in the first layer; one choice for all heads, the largest score of a group, of
#: several keys; nothing but the window; everything.
WAYS = {
    "quest": {},
    "shared": {"representative_type": "FIXED", "representative_num": 3, "head_select_mode": "SHARED"},
    "largest": {"representative_type": "MEAN", "representative_num": 1, "group_reduce": "max"},
    "streaming": {"top_k_blocks": 0},
    "dense": {"top_k_blocks": "all"},
}


@pytest.mark.parametrize("graphs", with_slow(["on", "off"], slow=["off"]))
@pytest.mark.parametrize("way", with_slow(list(WAYS), slow=["shared", "largest", "streaming", "dense"]))
def test_a_conversation_is_that_with_the_cpu(llama, way, graphs):
    found = {}
    for attend_on in ("cpu", "gpu"):
        found[attend_on] = conversation(llama, injected(llama, attend_on, cuda_graphs=graphs, **WAYS[way]))
        eject(llama)
    torch.testing.assert_close(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_covering_budget_is_full_attention(llama):
    tokens = random_tokens(75)
    cache = DynamicCache(config=llama.config)
    expected = told(llama, cache, tokens, prompt=60)
    found = told(llama, injected(llama, top_k_blocks=ALL), tokens, prompt=60)
    eject(llama)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-3, atol=1e-3)


def test_a_token_that_fails_between_its_slots_leaves_none_that_lies(llama, monkeypatch):
    tokens = random_tokens(90)
    expected = told(llama, injected(llama), tokens, prompt=80)
    eject(llama)
    cache = injected(llama)
    found = told(llama, cache, tokens[:, :80], prompt=80)
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fetch(*arguments)

    monkeypatch.setattr(resident_context, "fetch", failing)
    with pytest.raises(KeyboardInterrupt):
        told(llama, cache, tokens[:, 80:])
    found += told(llama, cache, tokens[:, 80:])
    eject(llama)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rows_of_several_lengths_equal_each_row_alone(llama):
    lengths, tokens, count = (70, 52), random_tokens(76, rows=2), 6
    alone = []
    for row, length in enumerate(lengths):
        cache = injected(llama)
        alone.append(told(llama, cache, tokens[row : row + 1, : length + count], prompt=length))
        eject(llama)
    cache = injected(llama)
    padded = torch.zeros(2, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, length in enumerate(lengths):
        padded[row, -length:], mask[row, -length:] = tokens[row, :length], 1
    llama(padded.to("cuda"), attention_mask=mask.to("cuda"), past_key_values=cache)
    for place in range(count):
        next_ones = torch.stack([tokens[row, length + place] for row, length in enumerate(lengths)])[:, None]
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
        logits = llama(next_ones.to("cuda"), attention_mask=mask.to("cuda"), past_key_values=cache).logits.cpu()
        expected = torch.stack([alone[row][1 + place][0] for row in range(2)])
        torch.testing.assert_close(logits[:, -1], expected, rtol=1e-4, atol=1e-4)


def test_a_saved_context_continues_as_if_nothing_had_happened(llama, tmp_path):
    cache, tokens = injected(llama), random_tokens(74)
    told(llama, cache, tokens[:, :68], prompt=60)
    cache.save(tmp_path / "context")
    expected = torch.cat(told(llama, cache, tokens[:, 68:]))
    loaded = HeteroCache.load(tmp_path / "context", llama)
    assert torch.equal(torch.cat(told(llama, loaded, tokens[:, 68:])), expected)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["twice", "behind"])
def test_saved_slots_that_are_no_blocks_of_the_context_are_refused(llama, tmp_path, wrong):
    cache = injected(llama)
    told(llama, cache, random_tokens(68), prompt=60)
    ids = cache.layers[1].resident._ids
    ids[..., -1] = ids[..., 0] if wrong == "twice" else 99
    cache.save(tmp_path / "context")
    with pytest.raises(DamagedContextError, match="blocks in slots are not distinct blocks of the Context"):
        HeteroCache.load(tmp_path / "context", llama)


def test_a_failed_token_is_undone(llama, monkeypatch):
    cache, tokens = injected(llama, cuda_graphs="on"), random_tokens(80)
    told(llama, cache, tokens[:, :76], prompt=60)
    fork = cache.fork()
    expected = torch.cat(told(llama, fork, tokens[:, 76:]))
    with monkeypatch.context() as patch:

        def refuse(self, largest):
            raise HeteroKVError("on purpose")

        patch.setattr(RetrievalLayer, "require_storable", refuse)
        with pytest.raises(HeteroKVError, match="on purpose"):
            told(llama, cache, random_tokens(1, seed=9))
    torch.testing.assert_close(torch.cat(told(llama, cache, tokens[:, 76:])), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def recorded(gpu, model, cache, tokens):
    """What decoding these tokens launches, copies and waits for, each alone, behind those that capture."""
    ids = tokens.to("cuda").split(1, dim=1)
    found = []
    for token in ids:
        gpu.record.clear()
        model.model(token, past_key_values=cache)
        found.append(list(gpu.record.everything))
    return found


def test_a_token_is_one_graph_and_the_host_waits_once(gpu, llama):
    cache = injected(llama, cuda_graphs="on")
    told(llama, cache, random_tokens(66), prompt=60)
    recorded(gpu, llama, cache, random_tokens(4, seed=1))
    for everything in recorded(gpu, llama, cache, random_tokens(BLOCK, seed=2)):
        launches = [each.name for each in everything if isinstance(each, Launch)]
        copies = [each for each in everything if isinstance(each, Copy)]
        assert launches.count("graph") == 1
        # The token's id and position, and a copy of the output.
        assert len(launches) <= 5
        assert len(everything) - len(launches) - len(copies) == 1
        assert all(copy.is_pinned and not copy.is_blocking for copy in copies)
        # For the layer with all tokens and for the other where the token is, and its keys and values. The table and a
        # block's representatives, where one enters the Context.
        assert len(copies) in (4, 6)


def test_a_greedy_answer_takes_two_launches_and_one_wait_for_a_token(gpu, llama):
    prompt = random_tokens(60)[0].tolist()
    found = {}
    for attend_on in ("cpu", "gpu"):
        forward, cache = ModelForward(llama), injected(llama, attend_on, cuda_graphs="on")
        sampler = Sampler(SamplingParams(temperature=0.0), prompt, 97)
        with AnswerTokens(forward, cache, sampler, prompt, forward.prompt(cache, prompt), limit=40) as answer:
            found[attend_on] = [next(answer).token for _ in range(8)]
            for _ in range(3 if attend_on == "gpu" else 0):
                gpu.record.clear()
                next(answer)
                # The token's id is copied to where the graph reads it.
                assert [each.name for each in gpu.record.launches] == ["copy_", "graph"]
                assert len(gpu.record.waits) == 1
                assert not gpu.record.pageable
        eject(llama)
    assert found["gpu"] == found["cpu"]


def test_an_answer_whose_logits_are_read_has_them(llama):
    cache, prompt, seen = injected(llama, cuda_graphs="on"), random_tokens(60)[0].tolist(), []
    logits = ModelForward(llama).prompt(cache, prompt)
    found = greedy(llama, cache, logits[None], 7, (), lambda each: seen.append(each.cpu()))
    assert [int(each.argmax()) for each in seen] == found.tokens


def test_a_greedy_answer_of_numbers_that_are_none_is_refused(llama):
    forward, cache = ModelForward(llama), injected(llama, cuda_graphs="on")
    forward.prompt(cache, random_tokens(60)[0].tolist())
    sampler = Sampler(SamplingParams(temperature=0.0), (), 97)
    for token in range(2, 8):
        (found,) = forward.likeliest(cache, token)
    assert isinstance(found, Likeliest)
    llama.lm_head.weight.mul_(float("nan"))
    (found,) = forward.likeliest(cache, 8)
    with pytest.raises(LogitsError, match="largest logit is nan"):
        sampler.choose(found)


def test_representatives_of_a_first_prompt_stay_on_the_gpu(gpu, llama):
    cache = injected(llama)
    told(llama, cache, random_tokens(80), prompt=80)
    # A block enters the Context with the next token, but no other.
    gpu.record.clear()
    told(llama, cache, random_tokens(1))
    of_block = 2 * 2 * 16 * 4
    sizes = [copy.nbytes for copy in gpu.record.copies if copy.to_device and "resident_context.py" in copy.line]
    assert sizes in ([], [of_block])
    assert cache.layers[1].context_blocks > 3


def test_what_crosses_the_bus_is_counted_and_bounded(gpu, llama):
    cache = injected(llama, top_k_blocks=2)
    told(llama, cache, random_tokens(90), prompt=80)
    of_block = 2 * BLOCK * 16 * 2 * 4
    read = cache.statistics["dram_bytes_read"]
    # The first layer has all tokens; no other reads more than it attends to, and some of it stays.
    assert read[0] == 0
    assert all(0 < each < 2 * of_block for each in read[1:])
    eject(llama)
    covering = injected(llama, top_k_blocks=ALL)
    told(llama, covering, random_tokens(81), prompt=80)
    blocks = covering.layers[1].context_blocks
    assert covering.statistics["dram_bytes_read"][1:] == [blocks * of_block] * (LAYERS - 1)
    told(llama, covering, random_tokens(1))
    assert covering.statistics["dram_bytes_read"][1:] == [blocks * of_block / 2] * (LAYERS - 1)


@pytest.fixture
def captures(monkeypatch):
    """The captures that have begun."""
    found, begin = [], CUDAGraph.capture_begin

    def noted(self, *args, **kwargs):
        found.append(self)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(CUDAGraph, "capture_begin", noted)
    return found


@pytest.mark.slow
def test_more_sequences_than_are_captured_are_not_captured_again_and_again(llama, captures):
    first = injected(llama, cuda_graphs="on")
    told(llama, first, random_tokens(64), prompt=60)
    caches = [first, *(first.fork() for _ in range(5))]
    for turn in range(4):
        for cache in caches:
            told(llama, cache, random_tokens(1, seed=turn))
    seen = len(captures)
    for turn in range(4):
        for cache in caches:
            told(llama, cache, random_tokens(1, seed=turn))
    assert len(captures) == seen


@pytest.mark.slow
def test_a_graph_of_a_cache_that_is_gone_serves_no_other(llama):
    tokens = [random_tokens(66, seed=seed) for seed in range(3)]
    inject(llama, rules("cpu"))
    expected = [torch.cat(told(llama, HeteroCache(llama), each, prompt=60)) for each in tokens]
    eject(llama)
    inject(llama, rules(cuda_graphs="on"))
    for each, wanted in zip(tokens, expected, strict=True):
        cache = HeteroCache(llama)
        torch.testing.assert_close(torch.cat(told(llama, cache, each, prompt=60)), wanted, rtol=1e-4, atol=1e-4)
        del cache
        gc.collect()


@pytest.mark.parametrize("tokens", with_slow([300, 60], slow=[60]))
def test_no_more_lives_on_the_gpu_than_was_planned(tokens):
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model("llama").to(torch.bfloat16))
        inject(model, rules(max_seq_len=tokens + 8))
        cache = HeteroCache(model)
        planned = Footprint.of(model.hetero_kv_injection).memory(tokens, 1)
        before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        told(model, cache, random_tokens(tokens + 1), prompt=tokens)
        assert gpu.memory.peak[0] - before <= planned.compute
        del cache
        gc.collect()


@pytest.mark.parametrize(
    ("recipe", "kwargs", "message"),
    [
        ("adaptive", {}, "estimated attention masses"),
        ("ktransformers", {}, "DYNAMIC counts the attention"),
        ("snapkv", {}, "preselect_block"),
        ("quest", {"kv_type": "Q8_0", "block_size": 32}, "stored in Q8_0"),
        ("quest", {"token_step": 2}, "token_step"),
        ("loki", {}, "chooser"),
        ("self_extend_quest", {}, "positions are grouped"),
    ],
)
def test_what_only_the_cpu_does_is_refused_by_name(recipe, kwargs, message):
    model = tiny_model("llama")
    with pytest.raises(HeteroKVError, match=f"attend_on is gpu, but .*{message}.*; set attend_on to cpu"):
        inject(model, rules(recipe=recipe, **kwargs))


def test_a_model_on_a_cpu_is_refused_by_name():
    model = tiny_model("llama")
    cache = injected(model)
    with torch.no_grad():
        model(random_tokens(60), past_key_values=cache)
        with pytest.raises(HeteroKVError, match="attend_on is gpu, but the model computes on the CPU; set attend_on"):
            model(random_tokens(1), past_key_values=cache)


@pytest.mark.filterwarnings("ignore:CUDA could not page-lock:RuntimeWarning")
def test_dram_that_cannot_be_locked_is_refused_by_name(gpu, llama, monkeypatch):
    monkeypatch.setattr(mapped_memory.MappedMemory, "reach", lambda self, size: False)
    cache = injected(llama)
    with pytest.raises(HeteroKVError, match="attend_on is gpu, but CUDA does not page-lock the DRAM of the blocks"):
        told(llama, cache, random_tokens(61), prompt=60)


@pytest.mark.slow
def test_a_block_that_is_not_read_is_seen(llama, monkeypatch):
    tokens = random_tokens(75)
    expected = torch.cat(told(llama, injected(llama), tokens, prompt=60))
    eject(llama)
    monkeypatch.setattr(resident_context, "fetch", lambda *args: None)
    found = torch.cat(told(llama, injected(llama), tokens, prompt=60))
    assert not torch.allclose(found, expected, rtol=1e-2)


def test_a_pool_that_is_written_while_it_is_read_is_seen(gpu, llama):
    cache = injected(llama)
    told(llama, cache, random_tokens(63), prompt=60)
    # After a token, whose kernels have been waited for, a block may be written.
    cache.layers[1].pool.keys.add_(0.0)
    resident, pool = cache.layers[1].resident, cache.layers[1].pool
    table = cache.groups[0].device_tokens[cache.layers[1].layout].table
    chosen = torch.zeros_like(resident._ids)
    fetch(pool.keys, table, chosen, chosen, resident._keys)
    pool.keys.add_(1.0)
    with pytest.raises(SimulatedCudaError, match="host memory was written while a kernel may still read it"):
        torch.cuda.synchronize()
