"""Defects of graphs that serve any rows of a bucket."""

from __future__ import annotations

from tests.mutations.seeded import Mutation

_RAGGED = "tests/operators/test_ragged_graphs_on_cuda.py::test_"

RAGGED_ROWS = (
    Mutation(
        "experts in DRAM are computed for rows that are not in use",
        "hetero_kv/adapter/experts_in_dram.py",
        "([each[:rows] for each in arrays], out[:rows])",
        "(arrays, out)",
        (_RAGGED + "the_cpu_computes_experts_for_the_rows_in_use",),
    ),
    Mutation(
        "a graph attends with the memory of rows that were there before",
        "hetero_kv/families/retrieval/device_tokens.py",
        "        if members != self._members:\n",
        "        if not self._members:\n",
        (_RAGGED + "conversations_join_and_leave_without_a_capture[quest]",),
    ),
    Mutation(
        "a plan counts the tables of one bucket of rows",
        "hetero_kv/families/retrieval/footprint.py",
        "rows_of_all(demand.batch)",
        "demand.batch",
        (_RAGGED + "tables_and_tokens_on_their_way_are_planned[quest]",),
    ),
)
