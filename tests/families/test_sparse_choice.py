"""The choices of a sparse prefill against plain torch and full attention."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.families.sparse_prefill import flexprefill, minference
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.head_views import HeadView, views
from hetero_kv.families.sparse_prefill.minference import MeasuredPattern, Pattern
from hetero_kv.gpu_ops.attention import chunk_attention

SCALE = 0.3
BLOCK = 64


def chunk_of(past, n, heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, n, 16, generator=generator)
    # Some keys are attended to by all, as in models.
    k, v = (torch.randn(1, 1, past + n, 16, generator=generator) for _ in range(2))
    k[:, :, ::37] += 2 * q.mean(dim=(0, 1, 2))
    return Chunk(q, k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:], SCALE, None)


def dense_of(chunk):
    return chunk_attention(chunk.q, chunk.past_k, chunk.past_v, chunk.k, chunk.v, chunk.scale, chunk.softcap)[0]


def masked(chunk, chosen):
    """Attention of one head to `chosen` [query blocks, tokens] and its own block, in plain torch."""
    past, n, total = chunk.past, chunk.n, chunk.total
    k, v = (torch.cat(parts, 2)[0, 0] for parts in ((chunk.past_k, chunk.k), (chunk.past_v, chunk.v)))
    away = torch.arange(past, total)[:, None] - torch.arange(total)[None]
    of_block = torch.arange(n) // BLOCK
    own = torch.arange(total)[None] >= past + of_block[:, None] * BLOCK
    scores = (chunk.q[0] @ k.T * SCALE).masked_fill(~((chosen[of_block] | own) & (away >= 0)), float("-inf"))
    return scores.softmax(-1) @ v


def reference_lines(chunk, head, lines, distances):
    """A vertical-slash of the tokens and distances with most of the last 64 queries' attention."""
    past, n, total = chunk.past, chunk.n, chunk.total
    k = torch.cat([chunk.past_k, chunk.k], 2)[0, 0]
    away = torch.arange(total - 64, total)[:, None] - torch.arange(total)[None]
    weights = (chunk.q[0, head, -64:] @ k.T * SCALE).masked_fill(away < 0, float("-inf")).softmax(1)
    by_distance = torch.stack([weights[away == distance].sum() for distance in range(total)])
    tokens = {*range(64), *weights.sum(0).topk(lines).indices.tolist()}
    kept = {*range(64), *by_distance.topk(distances).indices.tolist()} if distances else {*range(64)}
    chosen = torch.zeros(-(-n // BLOCK), total, dtype=torch.bool)
    chosen[:, sorted(tokens)] = True
    for query in range(n):
        seen = [past + query - distance for distance in kept if distance <= past + query]
        chosen[query // BLOCK, seen] = True
    return chosen


def test_vertical_slash_is_plain_torchs():
    chunk = chunk_of(300, 150)
    # Room for the seven best distances, whatever they are.
    view = HeadView(chunk, 0, 1)
    by_distance = torch.from_numpy(view.sums[1])
    far = [int(each) for each in by_distance.topk(7).indices if each >= BLOCK]
    seen = {at for away in far for at in range(away, away + BLOCK)} - {*range(2 * BLOCK - 1)}
    lines = view.lines_within(20, max(7, len(seen)))
    out = chunk.attention([lines, lines])[0][0]
    chosen = reference_lines(chunk, 1, 20, 7)
    assert lines.distances[0].tolist()[0] == 0
    assert torch.allclose(out[1], masked(chunk, chosen)[1], atol=1e-5)
    assert not torch.allclose(out, dense_of(chunk)[0], atol=1e-2)


def two_rows(n=100):
    """A chunk of two rows and four heads, of which two share keys."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 4, n, 16, generator=generator)
    past_k, past_v, k, v = (torch.randn(2, 2, tokens, 16, generator=generator) for tokens in (90, 90, n, n))
    return Chunk(q, past_k, past_v, k, v, SCALE, None)


@pytest.mark.parametrize("by_line", [None, {1}, {0, 2, 3}, set()])
def test_heads_profiled_together_see_what_each_sees_alone(by_line):
    chunk = two_rows()
    places = []
    for view in views(chunk, by_line):
        alone = HeadView(chunk, view.row, view.head)
        places.append((view.row, view.head))
        for sums, expected in zip(view.sums, alone.sums, strict=True):
            assert torch.allclose(torch.from_numpy(sums), torch.from_numpy(expected), atol=1e-5)
    assert places == [(row, head) for row in range(2) for head in range(4)]


def test_a_shape_is_sinks_and_a_window():
    chunk = chunk_of(300, 150)
    out = chunk.attention(minference.keys_of(chunk, [Pattern("a_shape", 80, 100)] * 2))[0][0]
    chosen = torch.zeros(3, 450, dtype=torch.bool)
    chosen[:, :80] = True
    for block in range(3):
        chosen[block, 300 + block * BLOCK - 99 :] = True
    assert torch.allclose(out, masked(chunk, chosen), atol=1e-5)


@pytest.mark.parametrize(("whole", "blocks"), [(1, 1), (22, 1), (23, 2), (86, 2), (87, 3), (999, 3)])
def test_the_last_queries_attend_to_everything(whole, blocks):
    """The third block has 22 queries."""
    chunk = chunk_of(300, 150)
    keys = minference.keys_of(chunk, [Pattern("a_shape", 80, 100)] * 2)
    sparse, out = chunk.attention(keys)[0], chunk.attention(keys, whole)[0]
    first = (3 - blocks) * BLOCK
    assert torch.equal(out[:, :, :first], sparse[:, :, :first])
    assert torch.allclose(out[:, :, first:], dense_of(chunk)[:, :, first:], atol=1e-5)
    assert not torch.allclose(sparse[:, :, first:], dense_of(chunk)[:, :, first:], atol=1e-2)


def reference_blocks(chunk, head, count=None, mass=None):
    """Key blocks by the products of block means: the `count` best, or the fewest whose softmax reaches `mass`."""
    past, n, total = chunk.past, chunk.n, chunk.total
    k = torch.cat([chunk.past_k, chunk.k], 2)[0, 0]
    means = torch.stack([part.mean(0) for part in k.split(BLOCK)])
    chosen = torch.zeros(-(-n // BLOCK), total, dtype=torch.bool)
    chosen[:, :BLOCK] = True
    for block, part in enumerate(chunk.q[0, head].split(BLOCK)):
        scores = means @ part.mean(0) * SCALE
        scores[torch.arange(len(means)) * BLOCK >= past + (block + 1) * BLOCK] = float("-inf")
        order, shares = scores.argsort(descending=True), scores.softmax(0)
        taken = count
        if mass is not None:
            taken = 1 + int((shares[order].cumsum(0) < mass).sum())
        for each in order[:taken].tolist():
            chosen[block, each * BLOCK : (each + 1) * BLOCK] = True
    return chosen


def test_block_sparse_is_plain_torchs():
    chunk = chunk_of(640, 130)
    out = chunk.attention(minference.keys_of(chunk, [Pattern("block_sparse", 0, 256)] * 2))[0][0]
    for head in range(2):
        assert torch.allclose(out[head], masked(chunk, reference_blocks(chunk, head, 4))[head], atol=1e-5)


@pytest.mark.parametrize("is_near", [True, False])
def test_flexprefill_is_plain_torchs(is_near, monkeypatch):
    monkeypatch.setattr(flexprefill, "NEAR", 1.0 if is_near else 0.0)
    chunk = chunk_of(640, 128)
    out, _, tokens = chunk.attention(flexprefill.keys_of(chunk, 0.6, 64 if is_near else 256))
    for head in range(2):
        if is_near:
            chosen = reference_blocks(chunk, head, mass=0.6)
        else:
            counts = [(sums.sort().values.flip(0).cumsum(0) < 0.6 * 64).sum() + 1 for sums in map(
                torch.from_numpy, HeadView(chunk, 0, head).sums)]  # fmt: skip
            chosen = reference_lines(chunk, head, max(256, int(counts[0])), int(counts[1]))
        assert torch.allclose(out[0, head], masked(chunk, chosen)[head], atol=1e-5)
    assert tokens.max() < (704 if is_near else 769)


def test_the_divergence_is_none_where_means_tell_the_attention():
    chunk = chunk_of(640, 64, seed=1)
    flat = Chunk(chunk.q, chunk.past_k * 0, chunk.past_v, chunk.k * 0, chunk.v, SCALE, None)
    view = HeadView(flat, 0, 0)
    # Equal keys: every block of keys before has the same share; only the last is seen in part.
    assert flexprefill.estimate_distance(view) < 0.1
    loud = chunk.past_k.clone()
    loud[:, :, 200] = 40 * chunk.q[0, 0].mean(0)
    sharp = Chunk(chunk.q, loud, chunk.past_v, chunk.k, chunk.v, SCALE, None)
    assert flexprefill.estimate_distance(HeadView(sharp, 0, 0)) > 0.1


def chosen_at(chunk, budget, price):
    """Each head's pattern."""
    return [
        minference.best_pattern(each, price) for each in minference.measured_patterns(chunk, dense_of(chunk), budget)
    ]


def test_the_search_takes_the_cheapest_pattern_at_a_high_price_and_the_closest_at_none():
    chunk = chunk_of(900, 128)
    exact = dense_of(chunk)
    assert all(each.first + each.rest <= 128 for each in chosen_at(chunk, 512, 1e6))
    closest = chosen_at(chunk, 512, 0.0)
    errors = {}
    tried = chunk.last(128)
    for pattern in minference.candidates(512):
        out = tried.attention(minference.keys_of(tried, [pattern] * 2))[0]
        errors[pattern] = (out - exact).square().sum(dim=(0, 2, 3)).div(exact.square().sum(dim=(0, 2, 3))).sqrt()
    for head, pattern in enumerate(closest):
        assert errors[pattern][head] == min(each[head] for each in errors.values())


SOME = [Pattern("block_sparse", 0, 64 * number) for number in range(4)]


@given(
    errors=st.lists(st.lists(st.floats(0, 2), min_size=3, max_size=3), min_size=4, max_size=4),
    price=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
)
def test_no_other_patterns_of_as_few_tokens_are_nearer(errors, price):
    """What one price chooses for each head is the best of all ways to spend as many tokens, or fewer."""
    tokens, heads = [64, 128, 512, 2048], range(3)
    tried = [[MeasuredPattern(SOME[row], errors[row][head], tokens[row]) for row in range(4)] for head in heads]
    kept = [minference.lower_convex_hull(each[::-1]) for each in tried]
    chosen = [SOME.index(minference.best_pattern(each, price)) for each in kept]
    for other in itertools.product(range(4), repeat=3):
        if sum(tokens[row] for row in other) <= sum(tokens[row] for row in chosen):
            own, others = (
                sum(errors[row][head] for row, head in zip(rows, heads, strict=True)) for rows in (chosen, other)
            )
            assert others >= own - 1e-12
    assert [minference.best_pattern(each, 1e9) for each in kept] == [SOME[0]] * 3


def test_only_patterns_that_some_price_prefers_are_kept():
    tokens, errors = [90.0, 90.0, 95.0, 300.0, 400.0], [0.5, 0.6, 0.5, 0.4, 0.1]
    tried = [MeasuredPattern(SOME[0], error, count) for count, error in zip(tokens, errors, strict=True)]
    assert minference.lower_convex_hull(tried) == [tried[0], tried[4]]
    bent = [*tried[:3], MeasuredPattern(SOME[0], 0.2, 200.0), tried[4]]
    assert minference.lower_convex_hull(bent) == [bent[0], bent[3], bent[4]]


def test_heads_that_say_nothing_take_the_fewest_tokens():
    chunk = chunk_of(900, 128)
    silent = Chunk(chunk.q, chunk.past_k, chunk.past_v * 0, chunk.k, chunk.v * 0, SCALE, None)
    found = minference.measured_patterns(silent, dense_of(silent), 512)
    assert [[tried.error for tried in head] for head in found] == [[0.0]] * 2


def test_patterns_with_nan_scores_are_not_kept():
    tried = [
        MeasuredPattern(SOME[0], 0.5, 90.0),
        MeasuredPattern(SOME[1], float("nan"), 90.0),
        MeasuredPattern(SOME[2], 0.1, 300.0),
    ]
    assert minference.lower_convex_hull(tried) == [tried[0], tried[2]]


def test_tokens_are_cheaper_in_longer_contexts():
    assert [minference.price_at(0.02, length) for length in (9216, 16384, 32768, 65536)] == [0.02, 0.02, 0.005, 0.00125]


def test_a_heads_error_is_weighed_by_its_output():
    """A head whose values are small gets few tokens, though by itself it is off as far as the other."""
    chunk = chunk_of(900, 128)
    k, v, past_k, past_v = (each.repeat(1, 2, 1, 1) for each in (chunk.k, chunk.v, chunk.past_k, chunk.past_v))
    q = chunk.q[:, :1].repeat(1, 2, 1, 1)
    v[:, 1] *= 1e-2
    past_v[:, 1] *= 1e-2
    both = Chunk(q, past_k, past_v, k, v, SCALE, None)
    loud, quiet = chosen_at(both, 512, 0.03)
    assert loud.first + loud.rest > 256
    assert quiet.first + quiet.rest == 16
    near = chosen_at(both, 512, 0.0)
    assert near[0] == near[1]


@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
def test_blocks_reach_the_target_mass_with_capped_scores_too(softcap):
    """Of keys that are equal within their block, whose means tell everything."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 20, 1, 16, generator=generator).expand(-1, -1, -1, BLOCK, -1).flatten(2, 3)
    q = 2 * torch.randn(1, 1, 1, 16, generator=generator).expand(-1, -1, 256, -1)
    chunk = Chunk(q, k[:, :, :1024], k[:, :, :1024], k[:, :, 1024:], k[:, :, 1024:], 0.5, softcap)
    (view,) = views(chunk)
    assert flexprefill.estimate_distance(view) < 0.1
    chosen = torch.from_numpy(flexprefill.blocks_of_mass(view.block_scores(), 0.95, 64).chosen)[-1]
    scores = k[0, 0] @ q[0, 0, -1] * 0.5
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    assert float(capped.softmax(0).view(20, BLOCK).sum(1)[chosen].sum()) >= 0.95


def test_a_head_that_looks_nearby_takes_the_least_number_of_distances_too():
    """Tokens that the chunk's last queries look at lie behind its first blocks of queries, distances do not."""
    q = torch.zeros(1, 1, 512, 16)
    q[..., 0] = 4.0
    # The later a key the more it is looked at.
    k = torch.zeros(1, 1, 1212, 16)
    k[..., 0] = torch.arange(1212) / 20
    (view,) = views(Chunk(q, k[:, :, :700], k[:, :, :700], k[:, :, 700:], k[:, :, 700:], SCALE, None))

    def distances(least):
        return sum(stop - first for first, stop in view.lines_of_mass(0.9, least).distances.tolist())

    # The nearest 64 are seen anyway, and with a block's 64 queries 127 tokens.
    assert (distances(0), distances(256)) == (64, 256)


@pytest.mark.parametrize(("least", "blocks"), [(64, 1), (65, 2), (190, 3), (192, 3)])
def test_the_least_number_of_tokens_is_filled_up_to_blocks(least, blocks):
    scores = torch.zeros(3, 10)
    scores[:, 0] = 50.0
    assert flexprefill.blocks_of_mass(scores, 0.5, least).chosen.sum(axis=1).tolist() == [blocks] * 3
