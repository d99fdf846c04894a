"""What the stages of `estimating_stages` pass on: rows, their groups of blocks, and what is known of blocks.

Kernels create them, from arrays and numbers of Numba's types.
"""

from typing import Any, NamedTuple


class Run(NamedTuple):
    """Neighbouring rows that choose together (`step_parts.end_of_run`), and what their call says.

    Attributes:
        queries: [rows, kv_heads, group, k_dim] float32.
        tokens: [rows] int64, positions of the new tokens in their sequences.
        drafted: whether these are consecutive tokens of one sequence, of which each sees those before itself.
        table, firsts, ends: of these rows, as the call's.
        context: [rows, blocks] int32, the ids of the Contexts' blocks, padded with -1.
        counts: [rows] int32, the numbers of these.
        positions, allowed, which, shared, scale, softcap, outside_lse, recorded: as the call's.
        target: as in `retrieval_step.BlockChoice`.
        most: the most blocks of a list, or blocks that single tokens are chosen from.
        attended: [rows, kv_heads, group, v_dim] float32, lse: [rows, kv_heads, group] float32, written.
        attended_mass, mass: [rows, kv_heads, group] float32, the call's masses, written.
        taken: [rows, 7] int64, written (`step_contract`).
    """

    queries: Any
    tokens: Any
    drafted: Any
    table: Any
    firsts: Any
    ends: Any
    context: Any
    counts: Any
    positions: Any
    allowed: Any
    which: Any
    shared: Any
    scale: Any
    softcap: Any
    target: Any
    most: Any
    outside_lse: Any
    attended: Any
    lse: Any
    attended_mass: Any
    mass: Any
    taken: Any
    recorded: Any


class Groups(NamedTuple):
    """The groups of a run's blocks.

    Attributes:
        number: groups of a row; 0 if every block is scored.
        ids: [rows, number] int32, where their representatives lie.
        opened: [rows, lists, n] int32, those whose blocks are scored, padded with -1.
        weights, masses: [rows, kv_heads, group, number] float32, the log-sum-exp of a group's scores if all were equal
            to the mean's, and estimated; without means not written.
    """

    number: Any
    ids: Any
    opened: Any
    weights: Any
    masses: Any


class Scores(NamedTuple):
    """What is known of the scored blocks of a run.

    Attributes:
        entries: [rows, lists, n] int32, their positions in the Context, padded with -1.
        ids: [rows * kv_heads, n] int32, where each kv head's part of them lies.
        likely: [rows, kv_heads, group, n] float32, scores of representatives.
        counts: [rows] int32, how many of the n count for a row: all, but in a run of several lengths.
        weights, masses: the same, the log-sum-exp of a block's scores if all were equal to the mean's, and estimated;
            n = 0 without means.
        unchoosable_lse: [rows, kv_heads, group] float32, the log-sum-exp of groups that are not opened.
        looks_at_all: whether masses are those of all blocks' keys.
    """

    entries: Any
    ids: Any
    likely: Any
    counts: Any
    weights: Any
    masses: Any
    unchoosable_lse: Any
    looks_at_all: Any
