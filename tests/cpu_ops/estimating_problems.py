"""A pool for estimating steps, and their reference in a few lines of torch."""

import math

import numpy as np
import torch

from hetero_kv.cpu_ops.chosen_blocks import LARGEST_SOFTMAX, MEAN, SOFTMAX
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep, StepEstimates, StepPool
from hetero_kv.cpu_ops.step_contract import CHOSEN, NOTHING_FORBIDDEN, WHOLE, row_ranges

# As the tiny llama's pool in tests/operators, so that no kernel is compiled for this alone.
ROWS, KV_HEADS, GROUP, DIM, BLOCK, BLOCKS = 2, 2, 2, 16, 4, 12
POOL = ROWS * BLOCKS + 3
FIRST, END, POSITION, SCALE = 1, BLOCKS - 2, (BLOCKS - 1) * BLOCK + 2, 0.6
CONTEXT = END - FIRST


class Problem:
    """A pool in which two rows have 12 blocks each, the last one with room, and a token of each row."""

    def __init__(self, seed, size=1.0, representative_num=2):
        rng = np.random.default_rng(seed)
        shape = (POOL, KV_HEADS, BLOCK, DIM)
        self.keys, self.values = (size * rng.standard_normal((2, *shape))).astype(np.float32)
        keys, values = torch.from_numpy(self.keys), torch.from_numpy(self.values)
        vectors = torch.stack([keys.mean(2), keys.std(2, correction=0)][:representative_num], dim=2)
        self.representatives = vectors.contiguous().numpy()
        self.value_means = values.mean(2, keepdim=True).numpy()
        # Entries of missing groups are never read.
        self.of_groups = np.full_like(self.representatives, np.nan), np.full_like(self.value_means, np.nan)
        self.lengths = np.full(POOL, BLOCK, np.int32)
        self.table = rng.permutation(POOL)[: ROWS * BLOCKS].reshape(ROWS, BLOCKS).astype(np.int32)
        self.lengths[self.table[:, -1]] = POSITION % BLOCK + 1
        self.q, self.k, self.v = (
            rng.standard_normal((ROWS, heads, 1, DIM)).astype(np.float32)
            for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
        )
        self.positions = NOTHING_FORBIDDEN
        self.out = np.empty((ROWS, KV_HEADS * GROUP, 1, DIM), np.float32)
        self.lse = np.empty((ROWS, KV_HEADS, GROUP), np.float32)
        self.masses = np.empty((2, ROWS, KV_HEADS, GROUP), np.float32)
        self.taken = np.empty((ROWS, WHOLE + 1), np.int64)

    def grouped(self, row, size):
        """Keys and values of each whole group of a row's context: [groups, kv_heads, size * block, dim]."""
        groups = self.table[row, FIRST : FIRST + CONTEXT // size * size].reshape(-1, size)
        parts = torch.from_numpy(self.keys), torch.from_numpy(self.values)
        return groups[:, -1], [part[torch.from_numpy(groups)].transpose(1, 2).flatten(2, 3) for part in parts]

    def step(self, choice, *, estimates=True, softcap=0.0, threads=2):
        vectors, means = self.of_groups
        for row in range(ROWS if choice.group_blocks > 1 else 0):
            last, (keys, values) = self.grouped(row, choice.group_blocks)
            both = torch.stack([keys.mean(2), keys.std(2, correction=0)], dim=2)
            vectors[last], means[last] = both[:, :, : vectors.shape[2]], values.mean(2, keepdim=True)
        pool = StepPool(
            self.keys, self.values, self.representatives, self.lengths, None, self.value_means if estimates else None,
            None, vectors if choice.group_blocks > 1 else None,
            means if choice.group_blocks > 1 and estimates else None,
        )  # fmt: skip
        return RetrievalStep(pool, GROUP, "deviation", softcap > 0, np.float32, threads, choice, has_mean=True)

    def run(
        self, step, which=CHOSEN, most=4, shared=False, softcap=0.0, allowed=NOTHING_FORBIDDEN, beside=-np.inf,
        positions=None,
    ):  # fmt: skip
        lists = 1 if shared else KV_HEADS
        self.positions = np.empty((ROWS, lists, most), np.int32) if positions is None else positions
        return step(
            self.q, self.k, self.v, row_ranges(ROWS, POSITION, FIRST, END), self.table, which, self.positions, allowed,
            shared, SCALE, softcap, self.out, self.lse,
            StepEstimates(np.full_like(self.lse, beside), self.masses, self.taken, NOTHING_FORBIDDEN),
        )  # fmt: skip


def scores_of(problem, row, softcap):
    """A row's scores of all keys [kv_heads, group, blocks, block], of its means, and one deviation above."""
    q = torch.from_numpy(problem.q).view(ROWS, KV_HEADS, GROUP, DIM)[row].double()
    parts = problem.keys, problem.representatives
    keys, vectors = (torch.from_numpy(part[problem.table[row]]).double() for part in parts)
    cap = capping(softcap)
    exact = cap(torch.einsum("hgd,bhtd->hgbt", q, keys) * SCALE)
    exact[:, :, -1, POSITION % BLOCK + 1 :] = -math.inf
    return exact, *around_means(q, vectors, cap)


def capping(softcap):
    return (lambda x: softcap * torch.tanh(x / softcap)) if softcap else (lambda x: x)


def around_means(q, vectors, cap):
    """Scores [kv_heads, group, n] of means, and one deviation above, by vectors [n, kv_heads, 1 or 2, dim]."""
    mean = torch.einsum("hgd,bhd->hgb", q, vectors[:, :, 0]) * SCALE
    if vectors.shape[2] == 1:
        return cap(mean), cap(mean)
    deviation = torch.einsum("hgd,bhd->hgb", q**2, vectors[:, :, 1] ** 2).sqrt() * SCALE
    return cap(mean), cap(mean + deviation)


def grouped(problem, row, choice, most, shared, softcap, allowed):
    """Of a row: which blocks each list may take, and the weights and masses of groups, -inf of what is opened."""
    size, lists = choice.group_blocks, 1 if shared else KV_HEADS
    count = -(-most * choice.group_factor // size) if allowed is None else len(allowed)
    groups, every = CONTEXT // size, list(range(CONTEXT))
    if size == 1 or count >= groups:
        return [every] * lists, *[torch.empty(KV_HEADS, GROUP, 0).double()] * 2
    last, _ = problem.grouped(row, size)
    q = torch.from_numpy(problem.q).view(ROWS, KV_HEADS, GROUP, DIM)[row].double()
    vectors = torch.from_numpy(problem.of_groups[0][last]).double()
    mean, likely = around_means(q, vectors, capping(softcap))
    if allowed is None:
        opened = [order.argsort(descending=True)[:count].tolist() for order in reduced(likely, choice.reduce, shared)]
    else:
        opened = [[block // size for block in allowed]] * lists
    weights, masses = mean + math.log(size * BLOCK), spread(mean, likely, size * BLOCK)
    for head in range(KV_HEADS):
        own = [group for group in opened[0 if shared else head] if group < groups]
        weights[head][:, own] = masses[head][:, own] = -math.inf
    return [[b for b in every if b >= groups * size or b // size in own] for own in opened], weights, masses


def reduced(scores, reduce, shared):
    """What each list chooses by, from [kv_heads, group, blocks]."""
    scores = scores.softmax(-1) if reduce in (SOFTMAX, LARGEST_SOFTMAX) else scores
    by_head = scores.mean(1) if reduce in (MEAN, SOFTMAX) else scores.amax(1)
    return by_head.sum(0, keepdim=True) if shared else by_head


def spread(mean, likely, count=BLOCK):
    """The log-sum-exp of `count` scores around a mean, one of which is one deviation above."""
    deviation, log_n = likely - mean, math.log(count)
    follows = deviation**2 < 2 * log_n
    return mean + torch.where(follows, log_n + deviation**2 / 2, deviation * math.sqrt(2 * log_n))


def taken(by, masses, among, times, choice, most, shared, window, elsewhere):
    """`times` the best of each list's blocks `among`, as many as settings say, or as reach the target."""
    order = reduced(by, choice.reduce, shared).tolist()
    total = torch.logaddexp(torch.logaddexp(masses.logsumexp(-1), window), elsewhere)
    share, before = torch.exp(masses - total[..., None]), torch.exp(window - total)
    found = []
    for each, may in enumerate(among):
        heads = slice(None) if shared else slice(each, each + 1)
        ranked, count = sorted(may, key=lambda block, scores=order[each]: -scores[block]), most
        if choice.target:
            reached, count = float(before[heads].mean()), 0
            while count < min(most, len(ranked)) and (reached < choice.target or count < choice.least):
                reached += float(share[heads, :, ranked[count]].mean())
                count += 1
        found.append(sorted(ranked[: count * times]))
    return found


def reference(problem, choice, most, *, shared=False, softcap=0.0, estimates=True, beside=-math.inf, allowed=None):
    """Per row: chosen positions of each list, out, lse, and the mass of what was attended to and of everything."""
    for row in range(ROWS):
        exact, mean, likely = scores_of(problem, row, softcap)
        inside = slice(FIRST, END)
        window = torch.cat([exact[:, :, :FIRST].flatten(2), exact[:, :, END:].flatten(2)], -1).logsumexp(-1)
        window = torch.logaddexp(window, torch.tensor(beside).double())
        weights, masses = mean[:, :, inside] + math.log(BLOCK), spread(mean[:, :, inside], likely[:, :, inside])
        entries, group_weights, group_masses = grouped(problem, row, choice, most, shared, softcap, allowed)
        likely = likely[:, :, inside].clone()
        for head in range(KV_HEADS):
            unseen = [b for b in range(CONTEXT) if b not in entries[0 if shared else head]]
            likely[head][:, unseen] = weights[head][:, unseen] = masses[head][:, unseen] = -math.inf
        among = [own if allowed is None else [b for b in allowed if b in own] for own in entries]
        settled = choice, most, shared, window, group_masses.logsumexp(-1)
        # Candidates: nothing, what the representatives propose, or everything that may be scored.
        chosen = entries if choice.rerank == 0 else taken(likely, masses, among, choice.rerank, *settled)
        if choice.rerank != 1:
            looked = exact[:, :, inside].logsumexp(-1)
            for head in range(KV_HEADS):
                at = chosen[0 if shared else head]
                masses[head, :, at] = looked[head][:, at]
            chosen = taken(masses, masses, among if choice.rerank == 0 else chosen, 1, *settled)
        out, lse, attended = [], [], []
        parts = problem.values, problem.value_means
        values, means = (torch.from_numpy(part[problem.table[row]]).double() for part in parts)
        group_values = torch.from_numpy(problem.of_groups[1][problem.grouped(row, choice.group_blocks)[0]]).double()
        group_values = group_values[: group_masses.shape[2]]
        around = [b for b in range(BLOCKS) if not FIRST <= b < END]
        for head in range(KV_HEADS):
            blocks = [FIRST + b for b in chosen[0 if shared else head]] + around
            rest = [b for b in range(FIRST, END) if b not in blocks] if estimates else []
            parts = [exact[head][:, blocks].flatten(1), weights[head][:, [b - FIRST for b in rest]]]
            vectors = [values[blocks, head].flatten(0, 1), means[rest, head, 0]]
            if estimates:
                parts.append(group_weights[head])
                vectors.append(group_values[:, head, 0])
            vectors = torch.cat(vectors)
            out.append(torch.cat(parts, -1).softmax(-1) @ vectors)
            lse.append(torch.cat(parts, -1).logsumexp(-1))
            left = [b for b in range(CONTEXT) if FIRST + b not in blocks]
            all_masses = torch.cat([parts[0], masses[head][:, left], group_masses[head]], -1)
            attended.append([parts[0].logsumexp(-1), all_masses.logsumexp(-1)])
        yield chosen, torch.stack(out), torch.stack(lse), [torch.stack(each) for each in zip(*attended, strict=True)]


def assert_same(problem, expected):
    for row, (chosen, out, lse, masses) in enumerate(expected):
        assert [[p for p in each if p >= 0] for each in problem.positions[row].tolist()] == chosen
        np.testing.assert_allclose(problem.out[row].reshape(out.shape), out, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(problem.lse[row], lse, rtol=1e-4, atol=1e-5)
        for found, mass in zip(problem.masses[:, row], masses, strict=True):
            np.testing.assert_allclose(found, mass, rtol=1e-4, atol=1e-5)
