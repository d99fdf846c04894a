"""RetroInfer equals its paper's formulas in plain torch."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.errors import HeteroKVError
from hetero_kv.families.token_retrieval.choosers.retroinfer import RetroInferSettings, spherical_clusters
from tests.support.token_problem import BLOCK, END, FIRST, TokenProblem

pytestmark = pytest.mark.usefixtures("one_thread")

# The blocks that close together, cut into segments of 32 tokens: the last of five, and two blocks one by one.
SEGMENTS = [(start, min(start + 4, END - 2)) for start in range(FIRST, END - 2, 4)] + [
    (END - 2, END - 1),
    (END - 1, END),
]


def clusters(keys, count):
    """Spherical k-means of centred keys [n, dim], ten rounds, from keys at equal steps: the tokens of each cluster."""
    unit = keys - keys.mean(dim=0)
    unit = unit / unit.norm(dim=1, keepdim=True)
    centres = unit[[(2 * each + 1) * len(keys) // (2 * count) for each in range(count)]].clone()
    for round_ in range(11):
        nearest = (unit @ centres.T).argmax(dim=1)
        for each in range(count if round_ < 10 else 0):
            if (nearest == each).any():
                total = unit[nearest == each].sum(dim=0)
                centres[each] = total / total.norm()
    return [torch.nonzero(nearest == each).flatten() for each in range(count)]


def reference(problem, row, head, exact, estimated):
    """Attention of a kv head's queries: section 4.2's three zones, and the tokens that it attends to."""
    keys, values, q = problem.keys[row, head], problem.values[row, head], problem.q[row, head]
    members, scale = [], problem.dim**-0.5
    for start, end in SEGMENTS:
        first = start * BLOCK
        members += [first + at for at in clusters(keys[first : end * BLOCK], (end - start) * 2)]
    members = [each for each in members if len(each)]
    means = torch.stack([keys[each].mean(dim=0) for each in members])
    sizes = torch.tensor([float(len(each)) for each in members])
    order = (q @ means.T * scale + sizes.log()).softmax(dim=1).mean(dim=0).argsort(descending=True).tolist()
    read = torch.cat([torch.nonzero(~problem.in_context).flatten(), *(members[each] for each in order[:exact])])
    weights, taken = [(q @ keys[read].T * scale).exp()], [values[read]]
    for each in order[exact : exact + estimated]:
        weights.append((q @ means[each] * scale).exp()[:, None] * len(members[each]))
        taken.append(values[members[each]].mean(dim=0, keepdim=True))
    weights = torch.cat(weights, dim=1)
    return weights @ torch.cat(taken) / weights.sum(dim=1, keepdim=True), len(read) - int((~problem.in_context).sum())


@pytest.mark.parametrize(("exact", "estimated"), [(3, 6), (5, 0), (1, 21)])
def test_a_step_is_that_of_the_formulas(exact, estimated):
    settings = {"cluster_tokens": 4, "segment_tokens": 32}
    problem = TokenProblem("retroinfer", exact_clusters=exact, estimated_clusters=estimated, **settings)
    answer, out, _ = problem.answered()
    tokens = []
    for row in range(2):
        for head in range(2):
            expected, read = reference(problem, row, head, exact, estimated)
            torch.testing.assert_close(out[row, head], expected, rtol=1e-3, atol=1e-4)
            tokens.append(read)
    assert answer.tokens == sum(tokens) / 4
    assert 0 < answer.share <= 1


def test_keys_of_some_directions_are_clustered_by_them():
    """Whatever all keys have in common, and however long each is."""
    random = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(3, 6, 16, generator=random), dim=2)
    directions = directions - directions.mean(dim=1, keepdim=True)
    which = torch.stack([torch.randperm(96, generator=random) % 6 for _ in range(3)])
    lengths = 1 + 0.2 * torch.rand(3, 96, 1, generator=random)
    keys = lengths * directions.gather(1, which[..., None].expand(-1, -1, 16))
    found = spherical_clusters(5 + keys + 0.01 * torch.randn(keys.shape, generator=random), 24)
    for head in range(3):
        assert len(found[head].unique()) > 6
        for each in found[head].unique():
            assert len(which[head][found[head] == each].unique()) == 1


def test_clusters_that_do_not_divide_a_block_are_refused():
    with pytest.raises(HeteroKVError, match="cluster_tokens is 12; clusters are stored with blocks"):
        RetroInferSettings(block_size=32, cluster_tokens=12)
