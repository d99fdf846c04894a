"""Mistakes that tests must see: each a change of a few words, and the tests that fail where it is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A mistake.

    Attributes:
        meaning: what goes wrong then.
        file: where, from the project's root.
        old: what stands there, once in the file.
        new: what is put in its place.
        tests: of which at least one must fail, as pytest takes them.
    """

    meaning: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_KEPT = "tests/eviction/test_kept_sets.py::test_the_kept_entries_are_those_of_the_dense_reference"
_RETRIEVAL = "tests/operators/test_retrieval.py::test_"
_SCHEDULE = "tests/operators/test_selection_schedule.py::test_"
_PRESELECTION = "tests/operators/test_preselection.py::test_"
_BOUNDED = "tests/operators/test_bounded_cache.py::test_"
_SHADOWKV = "tests/operators/test_shadowkv_cache.py::test_"
_GROUPS = "tests/operators/test_block_groups.py::test_"
_STEP = "tests/cpu_ops/test_estimating_step.py::test_"
_OPERATIONS = "tests/engine/test_faults.py::test_an_operation_that_fails_anywhere_is_done_or_not_done"
_FORWARDS = "tests/engine/test_faults.py::test_a_forward_that_fails_anywhere_leaks_nothing_and_changes_no_answer"
_GGML = "tests/store/test_storage.py::test_the_bytes_are_those_that_ggml_writes"
_AUTO = "tests/operators/test_attend_auto_on_cuda.py::test_"

MUTATIONS = (
    Mutation(
        "attend_on: auto counts one sequence of an engine's batch",
        "hetero_kv/rules/injection.py",
        "        decision = self.place.decide(self, operators, sequences, length)\n",
        "        decision = self.place.decide(self, operators, 1, length)\n",
        (_AUTO + "an_engine_counts_all_rows_of_its_batch",),
    ),
    Mutation(
        "attend_on: auto prefers the longer wait",
        "hetero_kv/planning/attention_place.py",
        "GPU if over_bus <= by_cpu else CPU",
        "CPU if over_bus <= by_cpu else GPU",
        (_AUTO + "the_shorter_wait_decides",),
    ),
    Mutation(
        "policies see attention without the model's softcap",
        "hetero_kv/families/bounded/attention.py",
        "ObservedAttention(q, lse, keys, call.scale, call.softcap, ",
        "ObservedAttention(q, lse, keys, call.scale, None, ",
        (f"{_KEPT}[tova-gemma2]",),
    ),
    Mutation(
        "policies see a log-sum-exp without the learned sink",
        "hetero_kv/families/bounded/attention.py",
        "out, lse = apply_sink(out, lse, call.sink)",
        "out, _ = apply_sink(out, lse, call.sink)",
        (f"{_KEPT}[tova-gpt_oss]",),
    ),
    Mutation(
        "what generated tokens receive is computed without the softcap",
        "hetero_kv/families/retrieval/accumulated_attention.py",
        "column_sums(q, lse, keys, self.scale, self.softcap)",
        "column_sums(q, lse, keys, self.scale, None)",
        (f"{_RETRIEVAL}dynamic_representatives_of_generated_blocks_follow_the_attention_of_decoded_queries[gemma2]",),
    ),
    Mutation(
        "the first block that leaves Local after preselection is never a candidate",
        "hetero_kv/families/retrieval/state.py",
        "with_entered(self.candidates, self.preselected_end, blocks)",
        "with_entered(self.candidates, self.preselected_end + 1, blocks)",
        (f"{_PRESELECTION}blocks_that_leave_local_after_preselection_are_candidates_from_the_first_one_on",),
    ),
    Mutation(
        "a turn that is undone leaves its budget, where that is a share",
        "hetero_kv/families/bounded/layer.py",
        "self.entries, self.length, self.prompt_length, self.budget, self.read = snapshot",
        "self.entries, self.length, self.prompt_length, _, self.read = snapshot",
        (f"{_BOUNDED}a_budget_that_is_a_share_is_that_of_the_last_prompt_which_was_not_undone",),
    ),
    Mutation(
        "slots keep keys of factors that are no more",
        "hetero_kv/families/shadowkv/context_layer.py",
        "self.count(statistics.with_factors())\n        if self.context.outliers is not None:",
        "self.count(statistics.with_factors())\n        if False:",
        (f"{_SHADOWKV}slots_equal_the_rebuilt_keys_also_after_new_factors",),
    ),
    Mutation(
        "a block that leaves Local between two selections is attended to by nobody",
        "hetero_kv/families/retrieval/decode.py",
        "with_entered(last, int(seen), context)",
        "last",
        (f"{_SCHEDULE}a_block_that_leaves_local_between_two_selections_is_attended_to[SHARED]",),
    ),
    Mutation(
        "a new prompt does not begin the count of token_step anew",
        "hetero_kv/engine/sequence.py",
        "            self.prompt_length = length",
        "            self.prompt_length = self.prompt_length or length",
        (f"{_SCHEDULE}a_new_prompt_resets_the_count_of_token_step",),
    ),
    Mutation(
        "a crop leaves blocks finalized that are written anew",
        "hetero_kv/engine/sequence.py",
        "self.finalized[layout] = min(self.finalized[layout], length // layout.block_size)",
        "self.finalized[layout] = self.finalized[layout]",
        (f"{_RETRIEVAL}after_a_crop_rewritten_blocks_have_new_representatives[22-MEAN]",),
    ),
    Mutation(
        "candidates outlive the blocks that were preselected",
        "hetero_kv/families/retrieval/layer.py",
        "state = replace(state, candidates=None, preselected_end=0)",
        "pass",
        (f"{_PRESELECTION}a_crop_into_the_preselection_makes_all_blocks_candidates",),
    ),
    Mutation(
        "a group has the variance within its blocks alone",
        "hetero_kv/families/retrieval/representatives.py",
        "deviations.square().mean(dim=1) + means.var(dim=1, correction=0)",
        "deviations.square().mean(dim=1)",
        (f"{_GROUPS}a_groups_representatives_are_those_of_all_its_keys[MEANSTD]",),
    ),
    Mutation(
        "a group that closes has what stood for it before",
        "hetero_kv/families/retrieval/prefill.py",
        "stop = (end - sink) // size\n",
        "stop = (end - 1 - sink) // size\n",
        (f"{_GROUPS}groups_are_kept_as_blocks_fill_and_turns_and_forks_part[settings0]",),
    ),
    Mutation(
        "a target is reached as if groups that are not opened received nothing",
        "cpu_ops/estimated_masses.py",
        "total = logaddexp(total, unchoosable_lse[row, head, query])",
        "total = logaddexp(total, np.float32(-np.inf))",
        ("tests/cpu_ops/test_estimated_masses.py::test_shares_are_of_everything_that_receives_attention",),
    ),
    Mutation(
        "coarse copies of keys are read as if their zero were 0",
        "cpu_ops/int4_key_scores.py",
        "-np.int32(ZERO) * total",
        "np.int32(0) * total",
        ("tests/cpu_ops/test_int4_key_scores.py::test_masses_are_those_of_scores_by_the_codes",),
    ),
    Mutation(
        "of blocks whose scores are equal none reaches a target",
        "cpu_ops/estimated_masses.py",
        "                count = number_above(keys, found)\n                for block",
        "                count, reached = number_above(keys, found), np.float32(2)\n                for block",
        (f"{_STEP}choices_attention_and_estimates_equal_the_references",),
    ),
    Mutation(
        "a turn that is undone has been read",
        "hetero_kv/families/retrieval/layer.py",
        "self._uncounted = uncounted[:count]",
        "self._uncounted = uncounted",
        (
            "tests/operators/test_read_bytes.py::test_a_forward_that_fails_and_a_reset_count_nothing",
            "tests/operators/test_step_counts.py::test_a_step_that_fails_is_not_counted",
        ),
    ),
    Mutation(
        "a drafted token sees those behind it",
        "cpu_ops/step_parts.py",
        "lengths[ids[position // block_size]] = position % block_size + 1",
        "pass",
        ("tests/operators/test_ragged_arrays.py::test_a_draft_has_the_logits_of_its_tokens_one_by_one_bit_by_bit",),
    ),
    Mutation(
        "forks count their steps together",
        "hetero_kv/families/retrieval/layer.py",
        "copied._uncounted = []",
        "copied._uncounted = self._uncounted",
        ("tests/operators/test_step_counts.py::test_forks_count_their_own_steps",),
    ),
    Mutation(
        "Q8_0 divides by the rounded scale",
        "hetero_kv/store/storage/ggml.py",
        "scales = groups.abs().amax(dim=-1, keepdim=True) / 127",
        "scales = (groups.abs().amax(dim=-1, keepdim=True) / 127).half().float()",
        (_GGML,),
    ),
    Mutation(
        "Q4_0 rounds down",
        "hetero_kv/store/storage/ggml.py",
        "_scaled(groups, scales) + 8.5",
        "_scaled(groups, scales) + 8.0",
        (_GGML,),
    ),
    Mutation(
        "a table that fails to change leaves the allocator's counts as they are",
        "hetero_kv/store/block_table.py",
        "            self.allocator.recount()",
        "            pass",
        (_OPERATIONS,),
    ),
    Mutation(
        "a forward that fails is not undone",
        "hetero_kv/engine/rollback.py",
        "        run_to_completion(go_back)",
        "        pass",
        # Retrieval by bounds changes nothing before a forward's end.
        (f"{_FORWARDS}[entries]",),
    ),
    Mutation(
        "a crop that is interrupted while blocks go is taken for one that has not begun",
        "hetero_kv/engine/batch.py",
        "            remedy = let_go",
        "            remedy = go_back",
        (_OPERATIONS,),
    ),
    Mutation(
        "what a pool of forks has room for leaves out the copies to come",
        "hetero_kv/engine/capacity.py",
        "return allocator.free_blocks - allocator.copies_to_own(np.concatenate(written))",
        "return allocator.free_blocks",
        ("tests/engine/test_fork.py",),
    ),
    Mutation(
        "a block is written to that a fork holds too",
        "hetero_kv/store/block_table.py",
        "if allocator.references(shared) == 1:",
        "if allocator.references(shared) <= 2:",
        ("tests/store/test_block_table.py",),
    ),
    Mutation(
        "CUDA's memory that runs out is a foreign error",
        "hetero_kv/errors.py",
        '"not enough memory", "out of memory", ',
        '"not enough memory", ',
        ("tests/engine/test_out_of_memory.py::test_every_kind_of_it_is_one_error_and_nothing_has_changed[cuda]",),
    ),
    Mutation(
        "slots outlive the steps that filled them and were undone",
        "hetero_kv/families/shadowkv/layer.py",
        "            # Later steps have filled the slots with other chunks.\n"
        "            self.context.outliers.residents.empty()",
        "            pass",
        (f"{_SHADOWKV}slots_forget_the_chunks_of_steps_that_were_undone",),
    ),
    Mutation(
        "a window holds one token too many",
        "hetero_kv/families/window/layer.py",
        "start = max(self._start, self._end - (self.window - 1))\n        if not self.has_room(tokens)",
        "start = max(self._start, self._end - self.window)\n        if not self.has_room(tokens)",
        ("tests/families/test_window_layer.py",),
    ),
    Mutation(
        "a policy's equal scores: the later entry stays",
        "gpu_ops/cached_entries.py",
        "dropped = cached - 1 - scores.flip(-1).argmin(dim=-1, keepdim=True)",
        "dropped = scores.argmin(dim=-1, keepdim=True)",
        ("tests/eviction/test_policies.py",),
    ),
    Mutation(
        "places among many candidates are taken for positions in the context",
        "cpu_ops/step_stages.py",
        "            in_context(positions, allowed)\n",
        "            pass\n",
        ("tests/cpu_ops/test_retrieval_step.py::test_many_blocks_are_chosen_by_all_threads_as_by_one",),
    ),
    Mutation(
        "of a group's heads the lowest score chooses blocks",
        "cpu_ops/chosen_blocks.py",
        "if of_query[block] > head_scores[block] or np.isnan(of_query[block]):",
        "if of_query[block] < head_scores[block] or np.isnan(of_query[block]):",
        ("tests/cpu_ops/test_chosen_blocks.py",),
    ),
    Mutation(
        "bfloat16 is rounded half away from zero",
        "cpu_ops/bfloat16_bits.py",
        "rounded = builder.add(bits, builder.add(odd, every(0x7FFF)))",
        "rounded = builder.add(bits, every(0x8000))",
        ("tests/cpu_ops/test_token_store.py",),
    ),
    Mutation(
        "attention over two sets is merged by the larger log-sum-exp",
        "gpu_ops/merge.py",
        "    lse = torch.logaddexp(lse_a, lse_b)",
        "    lse = torch.maximum(lse_a, lse_b)",
        ("tests/gpu_ops/test_merged_sets.py",),
    ),
    Mutation(
        "tokens are given to the wrong blocks of the pool where these do not follow each other",
        "hetero_kv/store/pool.py",
        "if int(ids[-1]) - int(ids[0]) == count - 1 and np.all(np.diff(ids) == 1):",
        "if int(ids[-1]) - int(ids[0]) == count - 1:",
        ("tests/store/test_block_table.py",),
    ),
)
