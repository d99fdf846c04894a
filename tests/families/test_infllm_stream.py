"""InfLLM's stream equals plain torch, through every operation on its cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import ConfigError
from hetero_kv.families.infllm_stream.layer import local_scores
from tests.support.devices import model_on
from tests.support.rotated_vectors import turned
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, BLOCK, SINK, BUDGET, KEPT, CHUNK = 12, 4, 4, 3, 2, 8
SMALL = {
    "chunk_size": 16, "block_size": BLOCK, "sink_tokens": SINK, "local_windows_len": WINDOW, "max_seq_len": 256,
    "kv_type": "FP32", "threads_num": 1, "top_k_blocks": BUDGET, "representative_num": KEPT,
    "stream_chunk": CHUNK,
}  # fmt: skip
IDS = torch.randint(2, 97, (1, 90), generator=torch.Generator().manual_seed(0))
PROMPT, TURN = 61, 66
PARTS = [IDS[:, :PROMPT], *IDS[:, PROMPT:TURN].split(1, dim=1), IDS[:, TURN:87], *IDS[:, 87:].split(1, dim=1)]
PROMPTS, ANSWERS = ((0, PROMPT), (TURN, 87)), ((PROMPT, TURN), (87, 90))
# Where chunks begin and end, and the tokens by which it is known which blocks may be retrieved: an answer's has itself.
CHUNKS = [(at, min(at + CHUNK, end), at) for begin, end in PROMPTS for at in range(begin, end, CHUNK)]
CHUNKS += [(at, at + 1, at + 1) for begin, end in ANSWERS for at in range(begin, end)]


def representatives(query, key, first, end):
    """The mean of the keys, unrotated, that the window's later queries score highest: [heads, blocks, dim] (eq. 2)."""
    n, kv_heads = key.shape[2], key.shape[1]
    away = torch.arange(n)[:, None] - torch.arange(n)[None]
    products = (query.unflatten(1, (kv_heads, -1)).sum(2) @ key.mT)[0]
    scores = products.masked_fill((away < 1) | (away >= WINDOW), 0).sum(1)
    plain = turned(key, -torch.arange(n))[0]
    scores, plain = (part[:, first * BLOCK : end * BLOCK].unflatten(1, (-1, BLOCK)) for part in (scores, plain))
    best = scores.topk(KEPT, dim=2).indices.unsqueeze(3).expand(-1, -1, -1, plain.shape[3])
    return plain.gather(2, best).mean(2)


def _reference(module, query, key, value, attention_mask, scaling, **_):
    """Every chunk over initial tokens, what it retrieves, and its window; distances end with the window."""
    n, group, sink = query.shape[2], query.shape[1] // key.shape[1], SINK // BLOCK
    query, key, value = query.double(), key.double(), value.double()
    p = torch.arange(n)
    far_query = turned(query, WINDOW - p)
    seen = torch.zeros(n, n, dtype=torch.bool)
    for begin, stop, known in CHUNKS:
        end = max(sink, (known - WINDOW) // BLOCK)
        seen[begin:stop, :SINK] = seen[begin:stop, end * BLOCK :] = True
        if end > sink:
            blocks = representatives(query, key, sink, end)
            queries = far_query[0, :, begin:stop].sum(1).unflatten(0, (-1, group)).sum(1)
            scores = (blocks * queries[:, None]).sum((0, 2))
            for block in scores.topk(min(BUDGET, end - sink)).indices + sink:
                seen[begin:stop, block * BLOCK : (block + 1) * BLOCK] = True
    distance = p[:, None] - p[None]
    every_key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    scores = torch.where(distance < WINDOW, query @ every_key.mT, far_query @ turned(every_key, -p).mT)
    scores = (scores * scaling).masked_fill((distance < 0) | ~seen, float("-inf"))
    return (scores.softmax(-1) @ value).float().transpose(1, 2).contiguous(), None


AttentionInterface.register("infllm_stream_reference", _reference)
AttentionMaskInterface.register("infllm_stream_reference", lambda *_, **__: None)


def logits(model, cache, parts):
    with torch.no_grad():
        return torch.cat([model(part.to(model.device), past_key_values=cache).logits for part in parts], dim=1)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected():
    with torch.no_grad():
        return tiny_model("llama", attn_implementation="infllm_stream_reference")(IDS).logits


@pytest.fixture
def streamed(model):
    """A function that puts the recipe in: the cache."""

    def injected(**settings):
        inject(model, "infllm_stream", command_line={**SMALL, **settings})
        return HeteroCache(model)

    yield injected
    if getattr(model, "hetero_kv_injection", None) is not None:
        eject(model)


def off(found, expected):
    return float((found.cpu() - expected).abs().max() / expected.abs().max())


def test_chunks_tokens_and_a_second_turn_are_the_papers_stream(model, streamed, expected):
    plain = tiny_model("llama")(IDS).logits
    assert off(plain, expected) > 1e-2
    assert off(logits(model, streamed(), PARTS), expected) < 1e-4


def test_prefill_chunks_of_another_length_make_no_difference(model, streamed, expected):
    assert off(logits(model, streamed(chunk_size=4096), PARTS), expected) < 1e-4


def test_a_window_over_everything_is_full_attention(model, streamed):
    plain = tiny_model("llama")(IDS).logits
    assert off(logits(model, streamed(local_windows_len=100), PARTS), plain) < 1e-4


def test_blocks_that_all_fit_are_attended_to_by_all(model, streamed):
    covering = logits(model, streamed(top_k_blocks=50), PARTS)
    eject(model)
    everything = logits(model, streamed(top_k_blocks="all"), PARTS)
    assert off(covering, everything) < 1e-4


def test_heads_retrieve_apart_where_they_are_to(model, streamed, expected):
    apart = logits(model, streamed(head_select_mode="SEPARATE"), PARTS)
    assert off(apart, expected) > 1e-3


def test_forks_saved_contexts_cuts_and_rows_go_on_as_if_nothing_had_been(model, streamed, tmp_path):
    cache = streamed()
    logits(model, cache, PARTS[:6])
    whole = logits(model, cache.fork(), PARTS[6:])
    cache.save(tmp_path / "context", IDS[:, :TURN])
    assert logits(model, HeteroCache.load(tmp_path / "context", model), PARTS[6:]).equal(whole)
    fork = cache.fork()
    fork.select([0, 0])
    assert off(logits(model, fork, [part.expand(2, -1) for part in PARTS[6:]]), whole.expand(2, -1, -1)) < 1e-4
    assert logits(model, cache, PARTS[6:]).equal(whole)


def test_cropped_tokens_are_not_retrieved(model, streamed):
    cache = streamed()
    logits(model, cache, PARTS[:1])
    cut = cache.fork()
    logits(model, cut, [IDS[:, :2]])
    cut.crop(-2)
    # Fewer queries than it takes for a block to leave the window: all that is left are what they added to its scores.
    assert off(logits(model, cut, PARTS[1:2]), logits(model, cache, PARTS[1:2])) < 1e-5


# In pieces: tests/operators/test_grouped_prompts_on_cuda.py.
@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_a_device_has_the_whole_sequence_in_a_second_turn(expected, device):
    model = model_on(device, tiny_model("llama"))
    inject(model, "infllm_stream", command_line=SMALL)
    assert off(logits(model, HeteroCache(model), PARTS), expected) < 1e-4


def test_the_scores_of_keys_are_sums_over_their_windows_queries():
    q, keys = (torch.randn(1, heads, 9, 6, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    whole = local_scores(q, 0, keys, 0, 4)
    of_key = sum(q[0, 2:, at] @ keys[0, 1, 3] for at in (4, 5, 6)).sum()
    torch.testing.assert_close(whole[0, 1, 3], of_key, rtol=1e-4, atol=1e-4)
    parts = local_scores(q[:, :, :5], 0, keys[:, :, :5], 0, 4), local_scores(q[:, :, 5:], 5, keys[:, :, 2:], 2, 4)
    whole[:, :, :5] -= parts[0]
    whole[:, :, 2:] -= parts[1]
    assert float(whole.abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("representative_type", "MEAN"),
        ("representative_reduce", "max"),
        ("preselect_block", True),
        ("prefill", "minference"),
    ],
)
def test_unsupported_operations_of_a_stream_are_refused_by_name(model, setting, value):
    one = {"representative_num": 1, "representative_reduce": "max"} if value == "MEAN" else {}
    with pytest.raises(ConfigError, match=f"{setting} is '?{value}'?; .*; set "):
        inject(model, "infllm_stream", command_line={**SMALL, **one, setting: value})


@pytest.mark.parametrize("head_select_mode", ["SHARED", "SEPARATE"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_equal_blocks_are_retrieved_by_their_order_in_one_row_as_in_two(kv_heads, head_select_mode):
    model = tiny_model("llama", num_key_value_heads=kv_heads)
    inject(model, "infllm_stream", command_line={**SMALL, "head_select_mode": head_select_mode})
    (_, operator, _), generator = model.hetero_kv_injection.attention_operators(), torch.Generator().manual_seed(0)
    for blocks in range(5, 60):
        several = torch.randn(2, kv_heads, blocks // 5, 16, generator=generator)
        vectors = several[:, :, torch.randint(blocks // 5, (blocks,), generator=generator)]
        q = torch.randn(2, 4, CHUNK, 16, generator=generator)

        def retrieved(rows, vectors=vectors, q=q):
            layer = SimpleNamespace(
                layout=SimpleNamespace(sink_blocks=0), representatives_before=lambda *_: vectors[rows]
            )
            return operator._retrieved(layer, q[rows], vectors.shape[2])

        together = retrieved(slice(2))
        assert torch.equal(together, torch.cat([retrieved(slice(1)), retrieved(slice(1, 2))]))
        for row, lists in enumerate(together.tolist()):
            for head, chosen in enumerate(lists):
                # An equal block comes first only if it is chosen too.
                heads = slice(None) if len(lists) == 1 else slice(head, head + 1)
                for block in chosen:
                    equal = (vectors[row, heads] == vectors[row, heads, block, None]).all(dim=2).all(dim=0)
                    before = [each for each in equal.nonzero().flatten().tolist() if each < block]
                    assert set(before) <= set(chosen)
