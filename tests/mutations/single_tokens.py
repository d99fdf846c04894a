"""Mistakes in the choice of single tokens, and in attention to them."""

from __future__ import annotations

from tests.mutations.seeded import Mutation

_FILE = "cpu_ops/chosen_tokens.py"
_REFERENCE = "tests/cpu_ops/test_chosen_tokens.py::test_chosen_tokens_and_the_rest_of_their_blocks_equal_the_references"
_GIVEN = "tests/cpu_ops/test_chosen_tokens.py::test_tokens_are_chosen_from_candidate_blocks"
_CLUSTERS = "tests/operators/test_clusters_on_cuda.py::test_"
_ON_DISK = "tests/contexts/test_larger_than_memory.py::test_of_single_tokens_those_blocks_are_read_before_"

SINGLE_TOKENS = (
    Mutation(
        "blocks of which no token is taken are read too",
        _FILE,
        "            blocks[entry] = -1\n",
        "            pass\n",
        (f"{_ON_DISK}that_hold_some",),
    ),
    Mutation(
        "of blocks that are used again all are read, whatever tokens are taken",
        "hetero_kv/families/retrieval/block_read_ahead.py",
        "which == CHOSEN or (which == AS_GIVEN and native.by_token)",
        "which == CHOSEN",
        (f"{_ON_DISK}that_hold_some",),
    ),
    Mutation(
        "what is left of a block counts for all its tokens",
        _FILE,
        "                weights[g, place] += fewer[size - taken[entry]]\n",
        "",
        (_REFERENCE,),
    ),
    Mutation(
        "chosen tokens stay in the mass of what is left of their block",
        _FILE,
        "total += is_left[entry, t] * shares[entry, t]",
        "total += shares[entry, t]",
        (_REFERENCE,),
    ),
    Mutation(
        "what is attended to in any case does not count for the target",
        _FILE,
        "np.float32(target) - before, target > 0",
        "np.float32(target), target > 0",
        (_REFERENCE,),
    ),
    Mutation(
        "of tokens that are equal more than the target needs are taken",
        _FILE,
        "                if reached >= needed:\n",
        "                if reached > 1:\n",
        ("tests/cpu_ops/test_chosen_tokens.py::test_of_equal_tokens_the_first_are_taken_as_few_as_reach_the_target",),
    ),
    Mutation(
        "tokens of places that hold no block are chosen",
        _FILE,
        "            keys[entry * size : (entry + 1) * size] = 0\n",
        "            pass\n",
        (_GIVEN,),
    ),
    Mutation(
        "the second query heads' largest shares are forgotten",
        _FILE,
        "most[token] = max(most[token], scores[token])",
        "most[token] = scores[token]",
        (_REFERENCE,),
    ),
    Mutation(
        "a thread's part of a list that others have too is lost",
        "cpu_ops/list_attention.py",
        "        merge_edges(edges, edge_sums, edge_most, edge_total, out, lse)\n",
        "",
        (_REFERENCE,),
    ),
    Mutation(
        "what was taken off the keys of a block is another block's",
        "cpu_ops/list_attention.py",
        "                                key_offsets, block * k_dim, shifts",
        "                                key_offsets, 0 * block, shifts",
        ("tests/cpu_ops/test_token_attention.py",),
    ),
    Mutation(
        "what is learned of a short prompt supports every long one behind it",
        "hetero_kv/families/token_retrieval/choosers/chooser.py",
        "return tokens >= RELEARN_FACTOR * learned",
        "return False",
        ("tests/operators/test_token_retrieval.py::test_a_long_prompt_behind_a_short_one_is_learned_from",),
    ),
    Mutation(
        "a rollback comes back to rows whose blocks others have derived anew",
        "hetero_kv/engine/batch.py",
        "for group in {*before, *self.groups} if reopened else ():",
        "for group in self.groups:",
        ("tests/operators/test_token_retrieval.py::test_a_failed_turn_leaves_the_index_unchanged",),
    ),
    Mutation(
        "clusters have tokens that are in the window",
        "hetero_kv/families/token_retrieval/choosers/retroinfer.py",
        "if 0 < end <= context_end",
        "if 0 < end <= full",
        ("tests/operators/test_token_retrieval.py::test_clusters_end_where_the_context_does",),
    ),
    Mutation(
        "a GPU keeps the clusters of blocks that a crop has opened again",
        "hetero_kv/families/token_retrieval/resident_layer.py",
        "            self.resident.shorten(max(step.blocks(self.layout).newly_finalized[0], sink) - sink)\n",
        "            pass\n",
        (_CLUSTERS + "a_conversation_and_its_statistics_are_those_with_the_cpu",),
    ),
    Mutation(
        "tokens of clusters for which there are no slots cross the bus uncounted",
        "hetero_kv/families/retrieval/resident_layer.py",
        "int(sent.missed.sum()) + (0 if sent.beyond is None else int(sent.beyond.sum()))",
        "int(sent.missed.sum())",
        (_CLUSTERS + "what_crosses_the_bus_is_counted",),
    ),
)
