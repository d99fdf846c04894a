"""Mistakes in what outlasts a process: saved contexts and compiled kernels; and in what passes between devices."""

from __future__ import annotations

from tests.mutations.seeded import Mutation

_FILES = "tests/contexts/test_context_files.py::test_"
_STORE = "tests/contexts/test_context_store.py::test_"
_PACKED = "tests/gpu_ops/test_packed_weights.py::test_"
_HIDDEN = "tests/operators/test_hidden_in_dram.py::test_answers_are_the_same_wherever_hidden_states_lie"

_SLOTS = "tests/operators/test_shadowkv_on_cuda.py::test_it_attends_to_and_counts_what_it_does_when_the_host_chooses"
_PIECES = "tests/families/test_prompt_writing.py::test_"
_PROMPTS = "tests/operators/test_shadowkv_prompts_on_cuda.py::test_"
_CAPTURED = "tests/operators/test_captured_steps.py::test_"

_SLOTS_STAY = "slots_stay_through_a_turn_that_brings_no_new_outlier_and_all_is_counted_as_on_a_cpu"
_BOUNDED = "tests/operators/test_bounded_on_cuda.py::test_kernels_decode_as_torch_does"

LASTING = (
    Mutation(
        "a turn without new outliers empties the slots",
        "hetero_kv/families/shadowkv/context_layer.py",
        "if not is_another:",
        "if False:",
        (f"{_PROMPTS}{_SLOTS_STAY}",),
    ),
    Mutation(
        "a turn keeps the outliers of before whatever has come",
        "hetero_kv/families/shadowkv/context_layer.py",
        "if not is_another:",
        "if True:",
        (f"{_PROMPTS}{_SLOTS_STAY}",),
    ),
    Mutation(
        "of a turn's keys the last piece alone says whether they are factored anew",
        "hetero_kv/families/gpu_prefill/writing.py",
        "self.sums = sums.clone() if self.sums is None else self.sums + sums",
        "self.sums = sums.clone()",
        ("tests/families/test_prompt_writing.py::test_received_attention_is_summed_over_all_pieces",),
    ),
    Mutation(
        "entries that are gathered on a GPU have their neighbours' scores",
        "gpu_ops/triton_kernels/cached_entries.py",
        "tl.load(own + source, mask=is_entry & (source < known), other=0)",
        "tl.load(own + source + 1, mask=is_entry & (source + 1 < known), other=0)",
        (_BOUNDED, "tests/gpu_ops/test_triton_kernels.py::test_entries_of_a_bounded_cache_equal_torchs"),
    ),
    Mutation(
        "a checkpoint keeps the smaller buffer that entries have left",
        "hetero_kv/store/growing_tensor.py",
        "            self._have_checkpoints_follow(buffer)\n",
        "",
        (
            "tests/store/test_growing_tensor.py::test_a_checkpoint_follows_to_a_larger_buffer_and_the_smaller_one_is_freed",
            f"{_PROMPTS}a_later_turn_never_has_the_past_on_the_device[1.0]",
        ),
    ),
    Mutation(
        "a checkpoint follows entries that were dropped on the way",
        "hetero_kv/store/growing_tensor.py",
        "before is self._buffer and self._start <= start and end <= self._end",
        "before is self._buffer",
        ("tests/store/test_growing_tensor.py",),
    ),
    Mutation(
        "factors that a turn has replaced stay on the GPU",
        "hetero_kv/families/shadowkv/context_layer.py",
        "        before.park()\n",
        "",
        ("tests/operators/test_shadowkv_prompts_on_cuda.py::test_a_later_turn_never_has_the_past_on_the_device",),
    ),
    Mutation(
        "nobody waits for the stream that fetches missing values",
        "hetero_kv/families/shadowkv/device_decode.py",
        "            joined(residents.value_slots)\n",
        "",
        (_SLOTS,),
    ),
    Mutation(
        "a GPU keeps the block table that it was given first",
        "hetero_kv/engine/device_table.py",
        " or not np.array_equal(self._sent, table)",
        "",
        (_SLOTS,),
    ),
    Mutation(
        "DRAM is unlocked while a kernel reads it",
        "gpu_ops/mapped_memory.py",
        "        torch.cuda.synchronize(device)\n",
        "        pass\n",
        ("tests/simulated_cuda/test_hazards.py::test_mapped_memory_is_unlocked_when_nobody_reads_it",),
    ),
    Mutation(
        "a captured token's states are written over by the next",
        "hetero_kv/adapter/captured_token.py",
        "self._output[self._result][:rows].clone()",
        "self._output[self._result][:rows]",
        (f"{_CAPTURED}a_returned_token_is_not_overwritten_by_the_next",),
    ),
    Mutation(
        "the number of stored tokens is captured",
        "hetero_kv/adapter/captured_token.py",
        "            put(name, tensor, self._inputs[name])\n",
        '            if name != "position_ids":\n                put(name, tensor, self._inputs[name])\n',
        (f"{_CAPTURED}logits_are_those_without_graphs[shadowkv]",),
    ),
    Mutation(
        "the cache's index names a kernel before it is written",
        "cpu_ops/kernel_cache.py",
        "    self._save_data(name, with_names(data))\n"
        "    if key not in overloads:\n"
        "        self._save_index({**overloads, key: name})\n",
        "    if key not in overloads:\n"
        "        self._save_index({**overloads, key: name})\n"
        "    self._save_data(name, with_names(data))\n",
        ("tests/cpu_ops/test_kernel_cache.py",),
    ),
    Mutation(
        "a context is taken whatever weights it was saved with",
        "hetero_kv/contexts/identity.py",
        "if weights and self.weights != here.weights:",
        "if False:",
        (f"{_FILES}another_model_is_refused_with_what_differs",),
    ),
    Mutation(
        "a damaged block is taken as it is",
        "hetero_kv/contexts/restoring.py",
        "    if filling.damaged:\n",
        "    if False:\n",
        (f"{_FILES}a_damaged_block_is_named",),
    ),
    Mutation(
        "a file that somebody has changed goes on being used",
        "hetero_kv/engine/mapped_file.py",
        "        if now == self._known:\n",
        "        if True:\n",
        ("tests/contexts/test_changed_files.py",),
    ),
    Mutation(
        "what lies in a file is planned as memory",
        "hetero_kv/planning/plan.py",
        "memory.store - self.resident.mapped",
        "memory.store",
        ("tests/contexts/test_larger_than_memory.py",),
    ),
    Mutation(
        "a file goes that another context has blocks in",
        "hetero_kv/contexts/index.py",
        "WHERE NOT listed AND file NOT IN (SELECT other FROM needs)",
        "WHERE NOT listed",
        (f"{_STORE}a_file_stays_while_another_context_needs_it",),
    ),
    Mutation(
        "blocks are known by their tokens alone",
        "hetero_kv/contexts/addresses.py",
        '        own.update(f"{layout} {content}".encode())\n',
        "",
        ("tests/contexts/test_context_store.py",),
    ),
    Mutation(
        "nobody waits for what a device sends",
        "gpu_ops/staging.py",
        "            self._event.synchronize()\n",
        "            pass\n",
        ("tests/gpu_ops/test_staging.py",),
    ),
    Mutation(
        "a layer does not wait for the chunk that it is given",
        "gpu_ops/chunk_stream.py",
        "            current.wait_event(self._ready[number % _SLOTS])\n",
        "",
        (f"{_HIDDEN}[llama]",),
    ),
    Mutation(
        "a chunk is copied over one that a layer still computes with",
        "gpu_ops/chunk_stream.py",
        "        self._inwards.wait_event(self._used[slot])\n",
        "",
        (f"{_HIDDEN}[llama]",),
    ),
    Mutation(
        "bytes of a code of a packed weight are read in another order",
        "gpu_ops/triton_kernels/packed_weights.py",
        "tl.join(tl.join(a, c), tl.join(b, d)), [UNITS, 16, 4]",
        "tl.join(tl.join(a, b), tl.join(c, d)), [UNITS, 16, 4]",
        (f"{_PACKED}triton_unpacks_and_multiplies_ggmls_numbers",),
    ),
    Mutation(
        "tied weights go to a GPU twice",
        "hetero_kv/weights/moving.py",
        "    if there is not None and move(there.data) is there.data:\n        return there\n",
        "",
        ("tests/models/test_packed_on_cuda.py::test_weights_go_where_the_model_goes",),
    ),
    Mutation(
        "a packed matrix is computed where it was and not where its layer is",
        "hetero_kv/adapter/quantized_matrix.py",
        "            self._quantized = weight_at(self._quantized, cast(torch.Tensor, self.packed))\n",
        "            pass\n",
        ("tests/models/test_packed_on_cuda.py::test_answers_are_those_of_the_numbers",),
    ),
    Mutation(
        "nobody waits for a piece of what is stored",
        "gpu_ops/prefetch.py",
        "            current.wait_event(event)\n",
        "",
        (f"{_PIECES}stored_tokens_come_back_in_pieces_as_they_are_read",),
    ),
    Mutation(
        "page-locked memory is filled with the next piece while it is copied",
        "gpu_ops/prefetch.py",
        "            before.synchronize()\n",
        "            pass\n",
        ("tests/gpu_ops/test_bus_transfers.py",),
    ),
    Mutation(
        "a prompt's blocks are taken before they have come",
        "gpu_ops/write_out.py",
        "        self._event.synchronize()\n",
        "",
        (f"{_PIECES}the_pool_equals_the_cpus",),
    ),
    Mutation(
        "less is page-locked than is stored",
        "gpu_ops/mapped_memory.py",
        "min(self.tensor.data_ptr() + size, self._end)",
        "min(self.tensor.data_ptr() + size // 2, self._end)",
        ("tests/gpu_ops/test_mapped_memory.py",),
    ),
    Mutation(
        "a kernel is launched on whatever GPU is the present one",
        "gpu_ops/merge.py",
        "        with torch.cuda.device(out_a.device):\n            return merge",
        "        if True:\n            return merge",
        ("tests/gpu_ops/test_merged_sets.py",),
    ),
    Mutation(
        "an earlier turn's newest tokens are not attended to",
        "hetero_kv/families/shadowkv/context_layer.py",
        "            buffer.keys[:, :, recent] = self.recent_keys.entries\n",
        "            buffer.keys[:, :, recent] = 0\n",
        (f"{_PROMPTS}a_later_turn_in_pieces_answers_as_one_on_a_cpu[1.0-FP32-0.0001]",),
    ),
    Mutation(
        "keys are factored anew without those before the turn",
        "hetero_kv/families/shadowkv/context_layer.py",
        "itertools.chain(self._keys_before(first), [new])",
        "itertools.chain([], [new])",
        (f"{_PROMPTS}a_later_turn_in_pieces_answers_as_one_on_a_cpu[0.0-Q8_0-0.001]",),
    ),
)
