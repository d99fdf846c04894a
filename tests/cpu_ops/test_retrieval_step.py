"""One retrieval call equals storing, scoring, choosing and attending in sequence."""

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.attention import attend_blocks
from hetero_kv.cpu_ops.chosen_blocks import LARGEST, MEAN, attended_ids, best_blocks
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.retrieval_step import BlockChoice, RetrievalStep, StepPool
from hetero_kv.cpu_ops.scores import block_scores
from hetero_kv.cpu_ops.step_contract import AS_GIVEN, CHOSEN, EVERYTHING, NOTHING_FORBIDDEN, row_ranges
from hetero_kv.cpu_ops.token_store import store_token

# As the tiny llama's pool in tests/operators, so that no kernel is compiled for this alone.
ROWS, KV_HEADS, GROUP, DIM, BLOCK, BLOCKS = 2, 2, 2, 16, 4, 12
POOL = ROWS * BLOCKS + 3
FIRST, END, POSITION = 1, BLOCKS - 2, (BLOCKS - 1) * BLOCK + 2


class Problem:
    """A pool in which two rows have 12 blocks each, the last one with room, and a token of each row."""

    def __init__(self, dtype=np.float32, score="quest", largest=False):
        rng = np.random.default_rng(0)
        shape = (POOL, KV_HEADS, BLOCK, DIM)
        self.keys, self.values = rng.standard_normal((2, *shape), np.float32)
        self.representatives = rng.standard_normal((POOL, KV_HEADS, 2, DIM), np.float32)
        self.lengths = np.full(POOL, BLOCK, np.int32)
        self.table = rng.permutation(POOL)[: ROWS * BLOCKS].reshape(ROWS, BLOCKS).astype(np.int32)
        self.lengths[self.table[:, -1]] = POSITION % BLOCK + 1
        tensors = [
            torch.from_numpy(rng.standard_normal((ROWS, heads, 1, DIM), np.float32))
            for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
        ]
        if dtype == np.uint16:
            tensors = [tensor.bfloat16() for tensor in tensors]
        self.numbers = [tensor.float().numpy() for tensor in tensors]
        self.inputs = [(t if dtype == np.float32 else t.view(torch.uint16)).numpy() for t in tensors]
        self.score = score
        pool = StepPool(self.keys, self.values, self.representatives, self.lengths)
        choice = BlockChoice(LARGEST if largest else MEAN)
        self.step = RetrievalStep(pool, GROUP, score, False, dtype, 2, choice)
        self.out = np.empty((ROWS, KV_HEADS * GROUP, 1, DIM), dtype)
        self.lse = np.empty((ROWS, KV_HEADS, GROUP), np.float32)

    def run(self, which, positions=NOTHING_FORBIDDEN, allowed=NOTHING_FORBIDDEN, position=POSITION, table=None):
        table = self.table if table is None else table
        flags = allowed, positions.shape[1] == 1
        return self.step(
            *self.inputs,
            row_ranges(ROWS, position, FIRST, END),
            table,
            which,
            positions,
            *flags,
            0.25,
            0.0,
            self.out,
            self.lse,
        )

    def expected(self, ids, threads=None):
        """Attention over lists of blocks [rows, lists, blocks], divided among threads if they are long."""
        counts = np.full(ids.shape[:2], ids.shape[2], np.int32)
        q = self.numbers[0].reshape(ROWS, KV_HEADS, GROUP, DIM)
        out, lse = attend_blocks(q, self.keys, self.values, ids, counts, self.lengths, 0.25, threads=threads)
        return out.reshape(self.out.shape), lse

    def scores(self, allowed=NOTHING_FORBIDDEN):
        """Of the Context's blocks, -inf where positions are not allowed."""
        context = np.ascontiguousarray(self.table[:, FIRST:END])
        counts = np.full(ROWS, END - FIRST, np.int32)
        q = self.numbers[0].reshape(ROWS, KV_HEADS, GROUP, DIM)
        scores = block_scores(q, self.representatives, context, counts, self.score)
        if allowed.shape[2] > 0:
            for row, head in np.ndindex(ROWS, KV_HEADS):
                others = np.setdiff1d(np.arange(END - FIRST), allowed[row, min(head, allowed.shape[1] - 1)])
                scores[row, head, :, others] = -np.inf
        return scores


def attended(table, positions, first=FIRST, end=END):
    """Ids of the attended blocks of rows of equal length."""
    ids, counts = attended_ids(table, positions, *row_ranges(ROWS, -1, first, end)[1:])
    assert (counts == ids.shape[2]).all()
    return ids


def one_by_one(problem, ranges, which, count, lists):
    """Each row's positions, out and lse from a call of its own, without the padding of its table."""
    for row in range(ROWS):
        blocks = int((problem.table[row] >= 0).sum())
        own = slice(row, row + 1)
        inputs = [part[own] for part in problem.inputs]
        positions, out, lse = np.full((1, lists, count), -1, np.int32), problem.out[own].copy(), problem.lse[own].copy()
        problem.step(
            *inputs, ranges[:, own].copy(), problem.table[own, :blocks].copy(), which, positions, NOTHING_FORBIDDEN,
            lists == 1, 0.25, 0.0, out, lse,
        )  # fmt: skip
        yield positions[0], out[0], lse[0]


@pytest.mark.parametrize("lists", [1, KV_HEADS])
@pytest.mark.parametrize("which", [EVERYTHING, AS_GIVEN, CHOSEN])
def test_rows_of_several_lengths_are_what_each_is_alone(which, lists):
    together, apart = Problem(), Problem()
    # The first row has fewer blocks, and all its tokens already.
    ranges = np.array([[-1, POSITION], [FIRST, FIRST], [END - 3, END]])
    for problem in (together, apart):
        problem.table[0, BLOCKS - 2 :] = -1
    positions = np.zeros((ROWS, lists, 4), np.int32)
    positions[:] = [0, 1, 3, -1]
    expected = list(one_by_one(apart, ranges, which, 4, lists)) if which != AS_GIVEN else None
    flags = NOTHING_FORBIDDEN, lists == 1
    together.step(
        *together.inputs, ranges, together.table, which, positions, *flags, 0.25, 0.0, together.out, together.lse
    )  # fmt: skip
    if expected is None:
        ids, counts = attended_ids(together.table, positions, ranges[1], ranges[2])
        q = together.numbers[0].reshape(ROWS, KV_HEADS, GROUP, DIM)
        out, lse = attend_blocks(q, together.keys, together.values, ids, counts, together.lengths, 0.25)
        np.testing.assert_allclose(together.out, out.reshape(together.out.shape), rtol=1e-5, atol=1e-6)
        return
    np.testing.assert_array_equal(together.keys, apart.keys)
    for row, (chosen, out, lse) in enumerate(expected):
        if which == CHOSEN:
            assert positions[row].tolist() == chosen.tolist()
        np.testing.assert_allclose(together.out[row], out, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(together.lse[row], lse, rtol=1e-5)


@pytest.mark.parametrize("lists", [1, KV_HEADS])
def test_a_row_with_no_context_attends_to_all_its_blocks_while_another_chooses(lists):
    problem = Problem()
    ranges = np.array([[-1, -1], [END, FIRST], [END, END]])
    positions = np.empty((ROWS, lists, 4), np.int32)
    flags = NOTHING_FORBIDDEN, lists == 1
    problem.step(*problem.inputs, ranges, problem.table, CHOSEN, positions, *flags, 0.25, 0.0, problem.out, problem.lse)
    assert (positions[0] == -1).all()
    whole = problem.expected(problem.table[:, None].copy())[0]
    np.testing.assert_allclose(problem.out[0], whole[0], rtol=1e-5, atol=1e-6)
    assert positions[1].tolist() == best_blocks(problem.scores(), 4, NOTHING_FORBIDDEN, lists == 1, False)[1].tolist()


@pytest.mark.parametrize("range_of_row", [(-1, END), (FIRST, BLOCKS + 1), (END, FIRST)])
@pytest.mark.parametrize("which", [AS_GIVEN, CHOSEN])
def test_a_context_outside_the_blocks_of_its_row_is_refused(which, range_of_row):
    problem, ranges = Problem(), row_ranges(ROWS, -1, FIRST, END)
    ranges[1:, 1] = range_of_row
    positions, flags = np.zeros((ROWS, 1, 1), np.int32), (NOTHING_FORBIDDEN, True)
    with pytest.raises(IndexError, match="in the context"):
        problem.step(
            *problem.inputs, ranges, problem.table, which, positions, *flags, 0.25, 0.0, problem.out, problem.lse
        )  # fmt: skip


@pytest.mark.parametrize("lists", [1, KV_HEADS])
@pytest.mark.parametrize("allowed", [None, [0, 2, 3, 5, 6]])
def test_the_best_blocks_are_chosen_and_attended_to(lists, allowed):
    problem = Problem()
    positions = np.empty((ROWS, lists, 4), np.int32)
    among = NOTHING_FORBIDDEN
    if allowed is not None:
        among = np.ascontiguousarray(np.broadcast_to(np.array(allowed, np.int32), (ROWS, lists, len(allowed))))
    largest = problem.run(CHOSEN, positions, among)
    assert largest == max(np.abs(part).max() for part in problem.numbers[1:])
    chosen = best_blocks(problem.scores(among), 4, NOTHING_FORBIDDEN, lists == 1, False)
    assert positions.tolist() == chosen.tolist()
    assert allowed is None or set(positions.ravel().tolist()) <= set(allowed)
    out, lse = problem.expected(attended(problem.table, chosen))
    np.testing.assert_array_equal(problem.out, out)
    np.testing.assert_array_equal(problem.lse, lse)


@pytest.mark.parametrize("lists", [1, KV_HEADS])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("candidates", [0, 5000])
def test_many_blocks_are_chosen_by_all_threads_as_by_one(lists, largest, candidates):
    problem, rng, first, end = Problem(largest=largest), np.random.default_rng(1), 3, 8990
    # Of blocks that are there many times, which tie.
    table = rng.integers(POOL, size=(ROWS, end + 5)).astype(np.int32)
    allowed = NOTHING_FORBIDDEN
    if candidates:
        places = [np.sort(rng.permutation(end - first)[:candidates]) for _ in range(ROWS * lists)]
        allowed = np.array(places, np.int32).reshape(ROWS, lists, candidates)
    positions = np.empty((ROWS, lists, 300), np.int32)
    flags = allowed, lists == 1
    problem.step(
        *problem.inputs, row_ranges(ROWS, -1, first, end), table, CHOSEN, positions, *flags, 0.25, 0.0, problem.out,
        problem.lse,
    )  # fmt: skip
    q = problem.numbers[0].reshape(ROWS, KV_HEADS, GROUP, DIM)
    context = np.ascontiguousarray(table[:, first:end])
    scores = block_scores(q, problem.representatives, context, np.full(ROWS, end - first, np.int32), problem.score)
    if candidates:
        kept = np.zeros(scores.shape, bool)
        for row, head in np.ndindex(ROWS, KV_HEADS):
            kept[row, head, :, allowed[row, min(head, lists - 1)]] = True
        scores[~kept] = -np.inf
    assert positions.tolist() == best_blocks(scores, 300, NOTHING_FORBIDDEN, lists == 1, largest).tolist()
    out, lse = problem.expected(attended(table, positions, first, end), threads=2)
    np.testing.assert_array_equal(problem.out, out)
    np.testing.assert_array_equal(problem.lse, lse)


@settings(max_examples=40, deadline=None)
@given(
    lists=st.sampled_from([1, KV_HEADS]),
    candidates=st.integers(1, END - FIRST),
    share=st.floats(0, 1),
    largest=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_choice_among_candidates_is_that_among_all_with_the_others_forbidden(
    lists, candidates, share, largest, ties, seed
):
    """Nothing is read of what is no candidate: its blocks may lie nowhere."""
    problem, rng = Problem(largest=largest), np.random.default_rng(seed)
    if ties:
        problem.representatives[:] = problem.representatives[:1]
    count, context = max(1, int(share * candidates)), END - FIRST
    lots = [np.sort(rng.permutation(context)[:candidates]) for _ in range(ROWS * lists)]
    allowed = np.stack(lots).astype(np.int32).reshape(ROWS, lists, candidates)
    chosen = best_blocks(problem.scores(allowed), count, NOTHING_FORBIDDEN, lists == 1, largest)
    out, lse = problem.expected(attended(problem.table, chosen))
    table, positions = problem.table.copy(), np.empty((ROWS, lists, count), np.int32)
    for row in range(ROWS):
        table[row, FIRST + np.setdiff1d(np.arange(context), allowed[row])] = POOL + 7
    problem.run(CHOSEN, positions, allowed, -1, table)
    assert positions.tolist() == chosen.tolist()
    np.testing.assert_array_equal(problem.out, out)
    np.testing.assert_array_equal(problem.lse, lse)


def test_candidates_outside_the_context_or_too_few_are_refused():
    problem, positions = Problem(), np.empty((ROWS, 1, 2), np.int32)
    for wrong in (-1, END - FIRST):
        allowed = np.tile(np.array([1, 2, wrong], np.int32), (ROWS, 1, 1))
        with pytest.raises(IndexError, match="allowed positions in the context"):
            problem.run(CHOSEN, positions, allowed, position=-1)
    for shape in ((ROWS, KV_HEADS, 3), (ROWS - 1, 1, 3), (ROWS, 1, 1)):
        with pytest.raises(ValueError, match="no more positions be chosen than are allowed"):
            problem.run(CHOSEN, positions, np.zeros(shape, np.int32), position=-1)


def test_the_token_is_stored_before_it_is_attended_to():
    problem, other = Problem(), Problem()
    problem.run(EVERYTHING)
    k, v = (np.ascontiguousarray(part[:, :, 0]) for part in other.numbers[1:])
    store_token(k, v, other.keys, other.values, other.table, POSITION)
    for mine, theirs in ((problem.keys, other.keys), (problem.values, other.values)):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(problem.out, other.expected(other.table[:, None].copy())[0])


def test_a_token_that_is_there_already_is_not_stored_again():
    problem = Problem()
    before = problem.keys.copy()
    assert problem.run(AS_GIVEN, np.zeros((ROWS, 1, 1), np.int32), position=-1) == 0
    np.testing.assert_array_equal(problem.keys, before)
    ids = attended(problem.table, np.zeros((ROWS, 1, 1), np.int32))
    np.testing.assert_array_equal(problem.out, problem.expected(ids)[0])


def test_numbers_of_bfloat16_are_widened_and_rounded():
    problem = Problem(np.uint16)
    problem.run(EVERYTHING)
    out = torch.from_numpy(problem.expected(problem.table[:, None].copy())[0])
    assert torch.equal(torch.from_numpy(problem.out).view(torch.bfloat16), out.bfloat16())


def test_places_outside_the_pool_are_refused():
    problem = Problem()
    for table, position in ((problem.table, BLOCKS * BLOCK), (problem.table + POOL, POSITION)):
        with pytest.raises(IndexError, match="position must lie in the blocks of table"):
            problem.run(EVERYTHING, position=position, table=table)
    padded = problem.table.copy()
    padded[0, -1] = -1
    with pytest.raises(IndexError, match="position must lie in the blocks of table"):
        problem.run(EVERYTHING, table=padded)
    with pytest.raises(IndexError, match="blocks of table must lie in the pool"):
        problem.run(CHOSEN, np.empty((ROWS, 1, 2), np.int32), position=-1, table=problem.table + POOL)
    with pytest.raises(IndexError, match="lists of blocks, or their lengths"):
        problem.run(EVERYTHING, position=-1, table=problem.table + POOL)


def test_arrays_that_do_not_fit_the_pool_are_refused():
    problem = Problem()
    pool = StepPool(problem.keys, problem.values, problem.representatives[..., :8], problem.lengths)
    with pytest.raises(ValueError, match="representatives"):
        RetrievalStep(pool, GROUP, "quest", False, np.float32, 2)
    with pytest.raises(TypeError):
        problem.step(*problem.inputs[::-1], None, None, 0, None, None, True, 1.0, 0.0, None, None)


@pytest.mark.parametrize("which", ["q", "k", "v", "table", "ranges", "positions", "out", "lse"])
def test_arrays_of_a_call_that_are_not_those_it_is_bound_to_are_refused(which):
    problem = Problem()
    q, k, v = problem.inputs
    call = {
        "q": q, "k": k, "v": v, "table": problem.table, "positions": np.zeros((ROWS, 1, 1), np.int32),
        "out": problem.out, "lse": problem.lse, "ranges": row_ranges(ROWS, POSITION, FIRST, END),
    }  # fmt: skip
    short = {name: array[:-1] if name == "table" else array[..., :-1].copy() for name, array in call.items()}
    short["positions"] = np.zeros((ROWS, KV_HEADS + 1, 1), np.int32)
    call[which] = short[which]
    before = problem.keys.copy()
    with pytest.raises(ValueError, match="that it was bound to"):
        problem.step(
            call["q"], call["k"], call["v"], call["ranges"], call["table"], AS_GIVEN, call["positions"],
            NOTHING_FORBIDDEN, True, 0.25, 0.0, call["out"], call["lse"],
        )  # fmt: skip
    np.testing.assert_array_equal(problem.keys, before)


def test_only_a_kernel_of_one_signature_has_an_address():
    with pytest.raises(ValueError, match="compiled for 0 signatures"):
        address_of(numba.njit(lambda x: x))
