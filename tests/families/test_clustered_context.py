"""A GPU chooses the clusters and tokens that the CPU chooses of the same numbers, and attends to them as it does."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.families.retrieval.device_context import LayerMemory, SentToken, fetched_arrays
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.families.token_retrieval import clustered_context
from hetero_kv.families.token_retrieval.choosers.chooser import TokenQuery, merged
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.gpu_ops.tiled_attention import tiled_attention
from tests.support.token_problem import DIM, END, FIRST, KV_HEADS, ROWS, TokenProblem

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_thread")]
pytest.importorskip("triton")

WINDOW, SCALE = 24, DIM**-0.5
#: Numbers and shares; several clusters of a block; soft-capped scores; slots for some of the tokens.
CASES = {
    "numbers": {"exact_clusters": 3, "estimated_clusters": 6},
    "shares": {"exact_clusters": 0.2, "estimated_clusters": 0.4, "softcap": 3.0},
    "blocks": {"cluster_tokens": 8, "exact_clusters": 2, "estimated_clusters": 0},
    "few slots": {"exact_clusters": 5, "estimated_clusters": 6, "slots": 11},
}


def window_of(device):
    """A window that is a ring of which each place is in use, but the token's."""
    random = torch.Generator().manual_seed(5)
    like = torch.empty(ROWS, KV_HEADS, 1, DIM, device=device)
    window = DeviceWindow(0, WINDOW - 1, 1, like, like)
    for part in (window.keys, window.values):
        part.copy_(torch.randn(part.shape, generator=random))
    return window


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_the_choice_and_the_attention_are_the_cpus(gpu, case, monkeypatch):
    settings, device = {"cluster_tokens": 4, "segment_tokens": 32, **case}, torch.device("cuda", 0)
    if (slots := settings.pop("slots", None)) is not None:
        monkeypatch.setattr(clustered_context.ClusterChoice, "slots", lambda *_: slots)
    problem = TokenProblem("retroinfer", **settings)
    window, past, pool = window_of(device), 1000, problem.pool
    k, v = torch.randn(2, ROWS, KV_HEADS, 1, DIM, generator=torch.Generator().manual_seed(6))
    place = past % WINDOW
    keys, values = window.keys.cpu().clone(), window.values.cpu().clone()
    keys[:, :, place], values[:, :, place] = k.squeeze(2), v.squeeze(2)
    softcap = problem.softcap or None
    around = tiled_attention(problem.q, keys, values, SCALE, softcap)
    # By the CPU.
    seen, attend = [], TokenQuery.attend

    def noted(query, positions, counts, *further):
        seen.append((positions, counts))
        return attend(query, positions, counts, *further)

    monkeypatch.setattr(TokenQuery, "attend", noted)
    answer = problem.chooser.attend(problem.request._replace(outside_lse=around[1]))
    expected, expected_lse = merged(around, (answer.out, answer.lse))
    ((positions, counts),) = seen

    q = problem.q.flatten(1, 2)[:, :, None]
    on_gpu = [each.to(device) for each in (q, k, v)]
    table = problem.request.context
    context = problem.chooser.on_gpu(FIRST).context(pool, table.shape[1] + 3, *on_gpu[1:])
    context.take_in(pool, table)
    mapped = [MappedMemory(array, device) for array in fetched_arrays(pool)]
    assert all(each.reach(each.tensor.nbytes) for each in mapped)
    heads = ROWS * KV_HEADS
    whole = {name: torch.zeros(heads, dtype=torch.int32, device=device) for name in ("missed", "beyond")}
    taken, shares = torch.zeros(heads, 1, dtype=torch.int32, device=device), torch.zeros(heads, device=device)
    sent = SentToken(
        *(torch.empty(each.shape, device=device) for each in on_gpu[1:]), taken=taken, shares=shares, **whole
    )
    numbers = torch.tensor([[past, past - WINDOW + 1, END - FIRST]], device=device)
    padded = torch.nn.functional.pad(torch.from_numpy(table), (0, 3)).to(device)
    call = AttentionCall(*on_gpu, SCALE, softcap, None, None)
    memory = LayerMemory((window.keys, window.values), window.initial, context.arrays)
    out, lse = context.attended(call, memory, pool, numbers, padded, sent)
    torch.testing.assert_close(out.cpu().view(expected.shape), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu().view(expected_lse.shape), expected_lse, rtol=1e-5, atol=1e-5)

    ids, told = (
        context._slots.ids.cpu(),
        context.counts(past + 1, END - FIRST, ROWS, sent.of_rows(slice(0, ROWS), ROWS)),
    )
    for row in range(ROWS):
        for head in range(KV_HEADS):
            own = positions[row, head, : counts[row, head]].tolist()
            found = ids[row, head][ids[row, head] >= 0].tolist()
            # The first tokens have slots.
            assert sorted(found) == own[: len(found)]
            number = row * KV_HEADS + head
            beyond = int(sent.beyond.cpu()[number])
            assert len(found) + beyond == len(own)
            assert len(found) == int(sent.missed.cpu()[number]) == int(sent.taken.cpu()[number])
            assert beyond == (0 if slots is None else max(len(own) - slots, 0))
    assert slots is None or sent.beyond.cpu().any()
    assert told.tokens == answer.tokens
    assert told.read == answer.read
    assert told.share == pytest.approx(answer.share, rel=1e-5)
    del mapped, context
    gc.collect()
