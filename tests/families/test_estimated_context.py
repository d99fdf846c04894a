"""A GPU chooses the tokens that the CPU's kernel chooses of the same numbers, and attends to them exactly."""

from __future__ import annotations

import gc
from typing import NamedTuple

import numpy as np
import pytest
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.retrieval_step import BlockChoice, RetrievalStep, StepEstimates, StepPool
from hetero_kv.cpu_ops.step_contract import ATTENDED, CHOSEN, NOTHING_FORBIDDEN, TOUCHED, WHOLE, row_ranges
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.device_context import LayerMemory, SentToken, fetched_arrays
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.families.retrieval.estimated_context import EstimatedChoice
from hetero_kv.families.retrieval.representatives import Representing
from hetero_kv.gpu_ops import token_choice
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import represent_blocks

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

ROWS, KV_HEADS, GROUP, DIM, SCALE = 2, 2, 3, 32, 0.2
SINK, LOCAL = 16, 16


class Case(NamedTuple):
    """A Context of `blocks` blocks, of which tokens of at most `most` blocks are chosen."""

    blocks: int = 40
    size: int = 16
    most: int = 12
    rerank: int = 0
    kind: str = "MEAN"
    target: float = 0.9
    least: int = 0
    softcap: float | None = None
    sharpness: float = 6.0


#: Choices that the target bounds, the budget, and the fewest tokens; by keys of all blocks, and of candidates.
CASES = {
    "target": Case(),
    "proposed": Case(blocks=60, rerank=8, kind="MEANSTD", size=32),
    "few candidates": Case(rerank=2, kind="MEAN", most=4),
    "budget": Case(most=3, target=0.99, sharpness=1.0),
    "least": Case(least=2, target=0.3, sharpness=12.0),
    "no target": Case(most=2, target=0.0),
    "soft-capped": Case(softcap=5.0, rerank=8, kind="MEANSTD"),
}


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled_pool(case):
    """A pool of random keys, similar within a block, with all that is derived from them."""
    kind = representatives.get(case.kind)
    count = 2 if case.kind == "MEANSTD" else 1
    pool = BlockPool(
        ROWS * case.blocks, KV_HEADS, case.size, DIM, DIM, storage.FP16, count, value_means=True, key_codes=True,
        representative_storage=storage.get("Q8_0"),
    )  # fmt: skip
    shape = ROWS * case.blocks, KV_HEADS, case.size, DIM
    pool.keys.copy_(random(*shape, seed=0) + random(shape[0], KV_HEADS, 1, DIM, seed=1))
    pool.values.copy_(random(*shape, seed=2))
    represent_blocks([pool], torch.arange(shape[0]), Representing(kind, count))
    return pool


def on_the_cpu(case, pool, table, q, outside):
    """The chosen tokens of each row and kv head, as numbers in the pool, and the counts of each row."""
    choice = BlockChoice(rerank=case.rerank, target=case.target, least=case.least, tokens=case.most * case.size)
    arrays = StepPool(
        pool.key_array, pool.value_array, pool.representative_array, np.full(pool.num_blocks, case.size, np.int32),
        value_means=pool.value_mean_array, key_codes=pool.key_code_array,
    )  # fmt: skip
    score = representatives.get(case.kind).score
    step = RetrievalStep(arrays, GROUP, score, case.softcap is not None, np.float32, 1, choice, True, False)
    width = min(case.most * choice.candidates, case.blocks)
    lse = np.empty((ROWS, KV_HEADS, GROUP), np.float32)
    recorded = np.full((ROWS, KV_HEADS, width * case.size), -1, np.int32)
    estimates = StepEstimates.of(lse, outside, recorded)
    nothing = np.zeros((ROWS, KV_HEADS, 1, DIM), np.float32)
    positions = np.empty((ROWS, KV_HEADS, width), np.int32)
    step(
        q.numpy(), nothing, nothing, row_ranges(ROWS, -1, 0, case.blocks), table, CHOSEN, positions, NOTHING_FORBIDDEN,
        False, SCALE, case.softcap or 0.0, np.empty(q.shape, np.float32), lse, estimates,
    )  # fmt: skip
    return [[set(each[each >= 0].tolist()) for each in row] for row in recorded], estimates.taken


def window_of(device):
    """A window whose ring begins in its middle, and where its token is."""
    like = torch.empty(ROWS, KV_HEADS, 1, DIM, device=device)
    window = DeviceWindow(SINK, LOCAL, LOCAL, like, like)
    window.keys.copy_(random(*window.keys.shape, seed=5))
    window.values.copy_(random(*window.values.shape, seed=6))
    past, local_start = 1000, 990
    at = [*range(SINK), *(SINK + (position - SINK) % window.ring for position in range(local_start, past + 1))]
    return window, past, local_start, at


def exact(case, pool, row, head, tokens, q, keys, values):
    """Attention in float64 to a window, to chosen tokens, and to the mean values of all others.

    row: the blocks of a row. tokens: the chosen ones of a kv head; q: [group, dim]. keys, values: of the window.
    """
    kind = pool.representative_storage
    capped = (lambda scores: case.softcap * (scores / case.softcap).tanh()) if case.softcap else (lambda scores: scores)
    chosen = torch.tensor(sorted(tokens), dtype=torch.long)
    blocks, offsets = chosen // case.size, chosen % case.size
    own = pool.keys[blocks, head, offsets].double(), pool.values[blocks, head, offsets].double()
    means = kind.decode(pool.representatives[row, head])[:, 0].double()
    mean_values = kind.decode(pool.value_means[row, head])[:, 0].double()
    remaining = torch.tensor([case.size - int((blocks == block).sum()) for block in row]).double()
    scores = [capped(q @ each.mT * SCALE) for each in (keys.double(), own[0], means)]
    scores[2] = scores[2] + remaining.log()
    weights = torch.cat(scores, dim=1).softmax(dim=1)
    return weights @ torch.cat([values.double(), own[1], mean_values])


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_the_choice_is_the_cpus_and_the_attention_exact(gpu, case):
    device, pool = torch.device("cuda", 0), filled_pool(case)
    ids = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(3)).view(ROWS, -1)
    table = ids.numpy().astype(np.int32)
    q = random(ROWS, KV_HEADS * GROUP, 1, DIM, seed=4) * case.sharpness
    k, v = random(ROWS, KV_HEADS, 1, DIM, seed=7), random(ROWS, KV_HEADS, 1, DIM, seed=8)
    window, past, local_start, at = window_of(device)
    new = SINK + (past - SINK) % window.ring
    keys, values = window.keys.cpu().clone(), window.values.cpu().clone()
    keys[:, :, new], values[:, :, new] = k.squeeze(2), v.squeeze(2)
    keys, values = keys[:, :, at], values[:, :, at]
    scores = q.view(ROWS, KV_HEADS, GROUP, DIM) @ keys.mT * SCALE
    scores = case.softcap * (scores / case.softcap).tanh() if case.softcap else scores
    expected, counts = on_the_cpu(case, pool, table, q, scores.logsumexp(dim=3).numpy())

    by_keys = case.rerank == 0
    times = (2 if case.target else 4) if by_keys else case.rerank
    choice = EstimatedChoice(case.most, times, by_keys, case.target, case.least, 0, case.size)
    on_gpu = [each.to(device) for each in (q, k, v)]
    context = choice.context(pool, case.blocks + 9, *on_gpu[1:])
    context.take_in(pool, table)
    mapped = [MappedMemory(array, device) for array in fetched_arrays(pool)]
    assert all(each.reach(each.tensor.nbytes) for each in mapped)
    heads = ROWS * KV_HEADS
    sent = SentToken(
        *(torch.empty(each.shape, device=device) for each in on_gpu[1:]),
        torch.zeros(heads, dtype=torch.int32, device=device),
        torch.zeros(heads, 4, dtype=torch.int32, device=device),
        torch.zeros(heads, device=device),
    )
    padded = torch.nn.functional.pad(torch.from_numpy(table), (0, 9)).to(device)
    numbers = torch.tensor([[past, local_start, case.blocks]], device=device)
    call = AttentionCall(*on_gpu, SCALE, case.softcap, None, None)
    memory = LayerMemory((window.keys, window.values), window.initial, context.arrays)
    out, _ = context.attended(call, memory, pool, numbers, padded, sent)
    out, taken, slots = out.cpu(), sent.taken.cpu().view(ROWS, KV_HEADS, 4), context._slots.ids.cpu()

    sizes = set()
    for row in range(ROWS):
        for head in range(KV_HEADS):
            # Of empty slots, the chosen tokens have been put into the first ones.
            found = slots[row, head][slots[row, head] >= 0]
            in_pool = ids[row][found // case.size] * case.size + found % case.size
            assert set(in_pool.tolist()) == expected[row][head]
            sizes.add(len(found))
            assert len(found) == int(sent.missed.cpu()[row * KV_HEADS + head])
            of_group = slice(head * GROUP, (head + 1) * GROUP)
            own = q[row, of_group, 0].double(), keys[row, head], values[row, head]
            right = exact(case, pool, ids[row], head, expected[row][head], *own)
            torch.testing.assert_close(out[row, of_group, 0].double(), right, rtol=1e-4, atol=1e-5)
        own = [
            taken[row, :, column].sum() for column in (token_choice.TOKENS, token_choice.TOUCHED, token_choice.WHOLE)
        ]
        assert own == [counts[row, column] for column in (ATTENDED, TOUCHED, WHOLE)]
    bounds = case.least * case.size, case.most * case.size
    assert min(sizes) >= bounds[0]
    assert max(sizes) <= bounds[1]
    if case in (CASES["target"], CASES["proposed"]):
        # The target decides, for each kv head another number.
        assert len(sizes) > 1
        assert max(sizes) < bounds[1]
    del mapped, context
    gc.collect()
