"""Mistakes in how prompts are attended to: what a sparse prefill chooses, and what is stored of turns before."""

from __future__ import annotations

from tests.mutations.seeded import Mutation

_GROUPED = "tests/operators/test_grouped_prompts_on_cuda.py::test_"

PROMPTS = (
    Mutation(
        "the numbers behind a row's last whole vector have no part in its maximum",
        "cpu_ops/row_maximum.py",
        "for t in range(whole, count):",
        "for t in range(whole, whole):",
        ("tests/cpu_ops/test_run_attention.py::test_the_largest_of_a_row_is_numpys",),
    ),
    Mutation(
        "what the weight of a norm makes of a prompt's numbers is not rounded before",
        "cpu_ops/fused_prefill_layer.py",
        "out[i] = rounded(out, number(rounded(out, numbers[i] * factor)) * weight[i])",
        "out[i] = rounded(out, numbers[i] * factor * weight[i])",
        ("tests/cpu_ops/test_prompt_layer.py::test_intermediate_results_are_rounded_to_bfloat16",),
    ),
    Mutation(
        "a row of a batch that is not the first has the positions behind the first one's",
        "cpu_ops/fused_prefill_layer.py",
        "c, s = cos[row % positions], sin[row % positions]",
        "c, s = cos[min(row, positions - 1)], sin[min(row, positions - 1)]",
        (
            "tests/cpu_ops/test_prompt_layer.py::test_rotation",
            "tests/operators/test_fused_prefill.py::test_prompts_are_the_same_the_short_way",
        ),
    ),
    Mutation(
        "policies that score a prompt's tokens by their logits get those of the last ones alone",
        "hetero_kv/adapter/strided_prefill.py",
        "cache.requesting(logits_to_keep=0)",
        "cache.requesting()",
        ("tests/operators/test_last_layer.py::test_the_head_gets_its_rows_of_the_last_layer",),
    ),
    Mutation(
        "what nobody asks the last layer for is left out whoever listens behind it",
        "hetero_kv/adapter/hidden_state_offload.py",
        "call.shape[1] > 1 and has_hooks(model, ChunkedDecoderLayer)",
        "False",
        ("tests/operators/test_last_layer.py::test_hooks_after_the_layers_see_every_token",),
    ),
    Mutation(
        "the fused prefill layer runs although a layer's parts have hooks",
        "hetero_kv/adapter/chunked_decoder_layer.py",
        "if not is_plain_but_for_projections(self.wrapped):",
        "if False:",
        ("tests/operators/test_fused_prefill.py::test_hooks_on_a_part_see_it_and_their_values_are_not_overwritten",),
    ),
    Mutation(
        "the fused prefill layer keeps the parts that a layer had before",
        "hetero_kv/adapter/chunked_decoder_layer.py",
        "if there != self._tried_with:",
        "if self._tried_with is None:",
        (
            "tests/operators/test_fused_prefill.py"
            "::test_a_part_that_is_exchanged_after_the_first_prompt_counts_in_the_next",
        ),
    ),
    Mutation(
        "arguments that attention might compute by are ignored on the short way",
        "hetero_kv/adapter/bridge.py",
        "if name not in _NO_INFLUENCE and name not in _OF_LAYERS",
        "if name == value",
        ("tests/operators/test_fused_prefill.py::test_extra_arguments_of_attention_are_not_ignored",),
    ),
    Mutation(
        "the fused prefill layer runs although it differs from the layer",
        "hetero_kv/adapter/llama_layer.py",
        "if difference <= tolerance:",
        "if difference <= 9 * tolerance + 1:",
        (
            "tests/operators/test_fused_prefill.py::test_a_wrong_way_is_noticed",
            "tests/operators/test_fused_prefill.py::test_layers_that_compute_something_else_go_on_by_themselves",
        ),
    ),
    Mutation(
        "grouped positions have the whole past in a layer's buffer",
        "hetero_kv/families/self_extend/layer.py",
        "(length - self.positions.neighbours) // size)) * size",
        "0)) * size",
        (f"{_GROUPED}a_later_turn_never_has_the_past_on_the_device",),
    ),
    Mutation(
        "a stream retrieves from its buffer what is stored",
        "hetero_kv/families/infllm_stream/layer.py",
        "(blocks < apart)",
        "(blocks < 0)",
        (f"{_GROUPED}a_later_turn_in_pieces_answers_as_one_on_a_cpu",),
    ),
    Mutation(
        "a chunk that a context's first tokens end in is sparse from its first token on",
        "hetero_kv/families/sparse_prefill/attention.py",
        "max(0, settings.prefill_from - chunk.past)",
        "0",
        (
            "tests/families/test_sparse_prefill.py"
            "::test_the_first_tokens_of_a_context_attend_to_everything_in_whatever_chunk_they_are",
        ),
    ),
    Mutation(
        "heads that share keys are looked at by the first one's queries",
        "hetero_kv/families/sparse_prefill/head_views.py",
        "by_token[self._heads.index(head)], by_distance[self._heads.index(head)]",
        "by_token[0], by_distance[0]",
        ("tests/families/test_sparse_choice.py::test_heads_profiled_together_see_what_each_sees_alone",),
    ),
    Mutation(
        "every head's error counts the same, whatever the head says",
        "hetero_kv/families/sparse_prefill/minference.py",
        "mean = (expected.square().sum() / expected.shape[1])",
        "mean = expected.square().sum(dim=(0, 2, 3))",
        ("tests/families/test_sparse_choice.py::test_a_heads_error_is_weighed_by_its_output",),
    ),
    Mutation(
        "tokens have no price",
        "hetero_kv/families/sparse_prefill/minference.py",
        "key=lambda each: each.error + price * each.tokens / 1024",
        "key=lambda each: each.error",
        ("tests/families/test_sparse_choice.py::test_no_other_patterns_of_as_few_tokens_are_nearer",),
    ),
    Mutation(
        "patterns are kept that no price prefers",
        "hetero_kv/families/sparse_prefill/minference.py",
        "            kept.pop()",
        "            break",
        ("tests/families/test_sparse_choice.py::test_only_patterns_that_some_price_prefers_are_kept",),
    ),
    Mutation(
        "tokens cost as much in a longer context",
        "hetero_kv/families/sparse_prefill/minference.py",
        "return price * min(1.0, (_PRICED_LENGTH / length) ** 2)",
        "return price",
        ("tests/families/test_sparse_choice.py::test_tokens_are_cheaper_in_longer_contexts",),
    ),
    Mutation(
        "only the last of a block of queries is matched with blocks of keys",
        "cpu_ops/matched_blocks.py",
        "(number + 1) * step",
        "tokens",
        ("tests/cpu_ops/test_matched_blocks.py::test_blocks_are_those_that_receive_most_from_a_few_queries",),
    ),
    Mutation(
        "blocks that lines show anyway are matched",
        "cpu_ops/matched_blocks.py",
        "_mark(runs, own[0], own[1], bits[column], named)",
        "_mark(runs, own[0], own[0], bits[column], named)",
        ("tests/cpu_ops/test_matched_blocks.py::test_blocks_are_those_that_receive_most_from_a_few_queries",),
    ),
    Mutation(
        "of matched blocks the last one that is better than the first is kept, whatever the others are",
        "cpu_ops/matched_blocks.py",
        "while place + 1 < count and of[place + 1] < share:",
        "while place + 1 < count:",
        ("tests/cpu_ops/test_matched_blocks.py::test_blocks_are_those_that_receive_most_from_a_few_queries",),
    ),
    Mutation(
        "a line's last token is a line of its own",
        "cpu_ops/key_runs.py",
        "first = number if first < 0 else first",
        "first = number",
        ("tests/cpu_ops/test_run_attention.py::test_ranges_are_of_neighbours",),
    ),
    Mutation(
        "what a span of tokens leaves for the next places is lost",
        "cpu_ops/vertical_slash_scores.py",
        "by_place[span, head, stop + column] = ahead[head, column]",
        "by_place[span, head, stop + column] = 0",
        ("tests/cpu_ops/test_vertical_slash_scores.py::test_attention_by_line_is_that_of_the_softmax",),
    ),
    Mutation(
        "spans of tokens are not rescaled to the largest score of all",
        "cpu_ops/vertical_slash_scores.py",
        "totals * np.exp2(most - largest)",
        "totals",
        ("tests/cpu_ops/test_vertical_slash_scores.py::test_attention_by_line_is_that_of_the_softmax",),
    ),
    Mutation(
        "patterns are preferred by what they cost in a chunk's context, not in the whole prompt's",
        "hetero_kv/families/sparse_prefill/attention.py",
        "minference.keys_of(chunk, self._patterns(length),",
        "minference.keys_of(chunk, self._patterns(chunk.total),",
        ("tests/families/test_sparse_prefill.py::test_all_chunks_of_a_prompt_have_one_price",),
    ),
    Mutation(
        "patterns are searched by the last chunk of a prompt, however few queries it has",
        "hetero_kv/families/sparse_prefill/attention.py",
        "        elif q.shape[2] == count:\n            self._search(chunk, q, exact)\n",
        "        else:\n            self._search(chunk, chunk.q, exact[:, :, -chunk.n :])\n",
        (
            "tests/families/test_prefill_patterns.py"
            "::test_patterns_are_searched_by_a_prompts_last_queries_in_whatever_chunks_they_are",
        ),
    ),
    Mutation(
        "a turn shorter than what patterns are searched by is searched by all the same",
        "hetero_kv/families/sparse_prefill/attention.py",
        "elif q.shape[2] == count:",
        "else:",
        ("tests/families/test_prefill_patterns.py::test_patterns_are_searched_behind_no_turn_that_has_fewer_queries",),
    ),
    Mutation(
        "what a policy has dropped counts as if the last queries of a turn saw it",
        "hetero_kv/families/bounded/attention.py",
        "self.prompt_attention(step, call, *past, layer.num_entries + layer.coming)",
        "self.prompt_attention(step, call, *past)",
        (
            "tests/families/test_sparse_prefill.py"
            "::test_a_later_turns_last_queries_attend_to_everything_that_a_policy_has_kept",
        ),
    ),
)
