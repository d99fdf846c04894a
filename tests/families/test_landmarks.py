"""Landmarks, outliers and chosen chunks are those of a plain reference."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.families.shadowkv.landmarks import chosen_chunks, landmarks
from hetero_kv.families.shadowkv.outlier_chunks import OutlierChoice


def reference(keys, q, chunk_size, outlier_count, count, scale, softcap):
    """Landmarks, outliers and chosen chunks per head, of keys [heads, tokens, dim] and queries [heads, group, dim]."""
    means, outliers, chosen = [], [], []
    for head, head_keys in enumerate(keys.double()):
        chunks = head_keys.split(chunk_size)
        mean = [chunk.mean(dim=0) for chunk in chunks]
        least = [
            min(float(torch.dot(k, m) / (k.norm() * m.norm())) for k in chunk)
            for chunk, m in zip(chunks, mean, strict=True)
        ]
        out = sorted(range(len(chunks)), key=least.__getitem__)[:outlier_count]
        rest = [i for i in range(len(chunks)) if i not in out]
        scores = q[head].double() @ torch.stack([mean[i] for i in rest]).T * scale if rest else torch.zeros(1, 0)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        best = scores.softmax(dim=1).amax(dim=0).argsort(descending=True)[:count]
        means.append(torch.stack(mean))
        outliers.append(set(out))
        chosen.append({rest[i] for i in best.tolist()})
    return torch.stack(means), outliers, chosen


@settings(max_examples=80, deadline=None)
@given(
    chunk_size=st.integers(1, 9),
    chunks=st.integers(1, 30),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    outlier_count=st.integers(0, 8),
    most=st.integers(1, 12),
    softcap=st.sampled_from([None, 3.0]),
    arrivals=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_landmarks_outliers_and_chosen_chunks_are_the_references(
    chunk_size, chunks, kv_heads, group, outlier_count, most, softcap, arrivals, seed
):
    generator = torch.Generator().manual_seed(seed)
    # A common direction, without which every chunk would be an outlier.
    keys = torch.randn(kv_heads, chunks * chunk_size, 8, generator=generator) + 1
    q = torch.randn(kv_heads, group, 8, generator=generator)
    cut = keys.unflatten(1, (chunks, chunk_size))[None]
    outliers = None
    # However a sequence comes, its outliers are those of the whole.
    for part in torch.arange(chunks).chunk(arrivals):
        first, end = int(part[0]), int(part[-1]) + 1
        new = cut[:, :, first:end]
        outliers = OutlierChoice(outliers, new, new, first, outlier_count).outliers()
    count = min(most, chunks - outliers.ids.shape[2])
    expected, expected_outliers, expected_chosen = reference(keys, q, chunk_size, outlier_count, count, 0.3, softcap)
    means = landmarks(cut)
    torch.testing.assert_close(means[0], expected.float(), rtol=1e-5, atol=1e-5)
    if chunk_size > 1:
        assert [set(ids) for ids in outliers.ids[0].tolist()] == expected_outliers
        outlier_keys = cut.gather(2, outliers.ids[..., None, None].expand(-1, -1, -1, chunk_size, 8))
        assert torch.equal(outliers.residents.outlier_keys, outlier_keys)
    else:
        # Every key is its own mean: all cosines are 1, and any chunks will do.
        outliers_of = [set(ids) for ids in outliers.ids[0].tolist()]
        assert [len(ids) for ids in outliers_of] == [len(ids) for ids in expected_outliers]
        return
    if count:
        chosen = chosen_chunks(q.flatten(0, 1)[None, :, None], means, outliers.ids, count, 0.3, softcap)
        assert [set(ids) for ids in chosen[0].tolist()] == expected_chosen


def test_an_outlier_is_never_chosen_even_where_every_other_share_underflows():
    landmark = torch.tensor([[[[1000.0], [0.0], [-1.0], [999.0]]]])
    q = torch.ones(1, 1, 1, 1)
    chosen = chosen_chunks(q, landmark, torch.tensor([[[0]]]), 3, scale=1.0)
    assert set(chosen.flatten().tolist()) == {1, 2, 3}


def test_products_beyond_half_precision_choose_the_best_chunks_too():
    # 16 · 200 · 60 · (1 + i / 100), every product is beyond 65,504, scaled none is.
    keys = torch.full((1, 1, 8, 16), 60.0) * (1 + torch.arange(8)[:, None] / 100)
    q = torch.full((1, 1, 1, 16), 200.0)
    none = torch.empty(1, 1, 0, dtype=torch.int64)
    found = chosen_chunks(q.half(), keys.half(), none, 2, scale=0.001)
    assert set(found.flatten().tolist()) == {6, 7}
