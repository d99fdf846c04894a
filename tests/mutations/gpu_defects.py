"""Defects that the path of a GPU once had, made again."""

from __future__ import annotations

from tests.mutations.seeded import Mutation

_KERNELS = "tests/gpu_ops/test_attention_backend.py::test_the_chosen_backend_computes_what_it_can"
_STREAM = "tests/gpu_ops/test_layer_stream.py::test_"
_CAPTURES = "tests/operators/test_captured_steps.py::test_"
_RESIDENT = "tests/operators/test_resident_on_cuda.py::test_"
_ESTIMATED = "tests/operators/test_estimated_on_cuda.py::test_"
_CHOICE = "tests/families/test_estimated_context.py::test_the_choice_is_the_cpus_and_the_attention_exact"
_EXPERTS = "tests/operators/test_experts_in_dram.py::test_"
_PLACED = "tests/models/test_experts_placed.py::test_"
_FITS = "tests/operators/test_weights_in_dram.py::test_a_model_"

DEFECTS = (
    Mutation(
        "a captured token takes the experts' result of the token before",
        "hetero_kv/adapter/graph_recording.py",
        "            self.between.append((lambda cache: work.result(cache.required_batch.sequences), out))\n",
        "            self.between.append((lambda _: None, out))\n",
        (_EXPERTS + "unpacked_experts_in_dram_answer_as_on_the_gpu[deepseek_v3]",),
    ),
    Mutation(
        "experts in DRAM go to the GPU with the model",
        "hetero_kv/adapter/quantized_experts.py",
        "_staying(fn) if self.engine.experts_device == DRAM else fn",
        "fn",
        (_EXPERTS + "experts_stay_in_dram_when_the_model_moves",),
    ),
    Mutation(
        "a plan has the experts in DRAM on the GPU too",
        "hetero_kv/planning/footprint.py",
        "return weights - experts, experts, experts > 0",
        "return weights, experts, experts > 0",
        (
            _PLACED + "a_gpu_holds_no_more_than_was_planned",
            _PLACED + "a_30b_mixture_fits_8_gb_of_gpu_memory_without_its_experts",
        ),
    ),
    Mutation(
        "a last block of few queries sees what a whole one would see",
        "gpu_ops/key_sets.py",
        "widths = [QUERY_BLOCK, n % QUERY_BLOCK] if",
        "widths = [QUERY_BLOCK, QUERY_BLOCK] if",
        ("tests/gpu_ops/test_key_sets.py::test_sets_are_the_runs_of_a_cpu",),
    ),
    Mutation(
        "a line that a slash covers counts twice",
        "gpu_ops/triton_kernels/set_attention.py",
        "        is_again = tl.load(is_offset + (stop - 1 - place)) != 0\n",
        "        is_again = place < 0\n",
        ("tests/gpu_ops/test_triton_kernels.py::test_attention_to_sets_is_that_in_float64",),
    ),
    Mutation(
        "a later turn on a GPU attends to all stored tokens, whatever its prefill",
        "hetero_kv/families/gpu_prefill/layer.py",
        "0 if self.loads_past else self.tokens_in_pieces",
        "self.tokens_in_pieces",
        ("tests/families/test_sparse_prefill_on_cuda.py::test_later_turns_are_as_sparse_as_on_a_cpu",),
    ),
    Mutation(
        "blocks that a crop took from the Context stay in their slots",
        "hetero_kv/families/retrieval/resident_context.py",
        "        self._ids.masked_fill_(self._ids >= context, NONE)\n",
        "        pass\n",
        (_RESIDENT + "a_conversation_is_that_with_the_cpu",),
    ),
    Mutation(
        "single tokens that a crop took from the Context stay in their slots",
        "hetero_kv/families/retrieval/token_slot_context.py",
        "        ids.masked_fill_(ids >= context * self._block_size, NONE)\n",
        "",
        (_ESTIMATED + "a_conversation_and_its_statistics_are_those_with_the_cpu",),
    ),
    Mutation(
        "on a GPU what the window receives does not count for the target",
        "gpu_ops/estimated_masses.py",
        "torch.logaddexp(every, around)",
        "every",
        (_CHOICE,),
    ),
    Mutation(
        "on a GPU what is left of a block counts for all its tokens",
        "hetero_kv/families/retrieval/estimated_context.py",
        "        leave(token_scores, is_taken, places, totals, known.weights, known.masses, counted)\n",
        "",
        (_CHOICE,),
    ),
    Mutation(
        "the GPU never learns of blocks that enter the Context",
        "hetero_kv/families/retrieval/device_tokens.py",
        "if not np.array_equal(table, self._sent_tables[row])]",
        "if not self._sent_tables[row].size]",
        (_RESIDENT + "a_conversation_is_that_with_the_cpu",),
    ),
    Mutation(
        "a crop leaves the Context on the GPU as it was",
        "hetero_kv/families/retrieval/indexed_layer.py",
        "        super().crop(length)\n        self._shorten(length)",
        "        super().crop(length)",
        (_RESIDENT + "a_conversation_is_that_with_the_cpu",),
    ),
    Mutation(
        "a cache's bytes on a GPU leave out the windows",
        "hetero_kv/families/retrieval/layer.py",
        "return 0 if self.window is None else self.window.nbytes",
        "return 0",
        ("tests/operators/test_decode_on_cuda.py::test_the_bytes_of_the_window_are_the_devices",),
    ),
    Mutation(
        "a sliding window on a GPU counts as DRAM",
        "hetero_kv/families/window/layer.py",
        '(part.device.type == "cpu") == cpu',
        "cpu",
        ("tests/families/test_window_layer.py::test_a_buffer_on_a_gpu_is_no_dram",),
    ),
    Mutation(
        "scores of landmarks are scaled behind a product in half precision",
        "hetero_kv/families/shadowkv/landmarks.py",
        "(q.to(landmark.dtype) * scale).reshape(batch, kv_heads, heads // kv_heads * tokens, dim)\n"
        "    scores = (folded @ landmark.transpose(2, 3)).float()",
        "q.to(landmark.dtype).reshape(batch, kv_heads, heads // kv_heads * tokens, dim)\n"
        "    scores = (folded @ landmark.transpose(2, 3)).float() * scale",
        ("tests/families/test_landmarks.py::test_products_beyond_half_precision_choose_the_best_chunks_too",),
    ),
    Mutation(
        "a GPU sums columns by tiles of a CPU's size",
        "gpu_ops/column_sums.py",
        'if device.type == "cpu":',
        'if device.type != "":',
        ("tests/gpu_ops/test_column_sums.py::test_tiles_fit_the_gpu",),
    ),
    Mutation(
        "float32 is attended to by tiles",
        "gpu_ops/attention_backend.py",
        "q.dtype in (torch.float32, *_HALVES) and runs_triton(q)",
        "q.dtype in _HALVES and runs_triton(q)",
        (_KERNELS,),
    ),
    Mutation(
        "torch's flash kernel runs on a GPU older than Ampere",
        "gpu_ops/attention_backend.py",
        ">= (8, 0)",
        ">= (7, 0)",
        (_KERNELS,),
    ),
    Mutation(
        "soft-capped attention is torch's flash kernel's",
        "gpu_ops/attention_backend.py",
        'if backend != "triton" and is_half and is_plain:',
        'if backend != "triton" and is_half:',
        (_KERNELS,),
    ),
    Mutation(
        "an answer's peak is that of the first GPU",
        "hetero_kv/chat/generation_monitor.py",
        "torch.cuda.max_memory_allocated(device)",
        "torch.cuda.max_memory_allocated()",
        ("tests/chat/test_conversation.py::test_the_peak_of_gpu_memory_is_that_of_the_models_gpu",),
    ),
    Mutation(
        "a run names the first GPU",
        "hetero_kv/evals/environment.py",
        'device if device is not None and device.type == "cuda" else None',
        "None",
        ("tests/evals/test_environment.py",),
    ),
    Mutation(
        "an error that CUDA keeps is taken from the first GPU",
        "gpu_ops/mapped_memory.py",
        "torch.zeros(1, device=device)",
        'torch.zeros(1, device="cuda")',
        ("tests/gpu_ops/test_mapped_memory.py::test_a_pending_error_is_taken_from_the_gpu_that_reads",),
    ),
    Mutation(
        "a ring that wraps is attended to up to its end",
        "hetero_kv/families/retrieval/device_window.py",
        "second_count if len(slots) > 1 else 0",
        "0",
        ("tests/operators/test_decode_on_cuda.py::test_two_launches_decode_as_torch_does",),
    ),
    Mutation(
        "the CPU is told the weight of the heaviest part of a window",
        "hetero_kv/families/retrieval/window_step.py",
        "np.logaddexp.reduce(window_lse, axis=2)",
        "window_lse.max(axis=2)",
        ("tests/operators/test_decode_on_cuda.py::test_two_launches_decode_as_torch_does",),
    ),
    Mutation(
        "what a token is to follow is copied over itself",
        "gpu_ops/staging.py",
        "if tensor.data_ptr() != self._follows.data_ptr():",
        "if tensor.data_ptr() == self._follows.data_ptr():",
        ("tests/gpu_ops/test_staging.py",),
    ),
    Mutation(
        "beams have their windows loaded anew",
        "hetero_kv/families/retrieval/layer.py",
        "        self.window = None if self.window is None else self.window.selected(list(rows))\n",
        "        self.window = None if self.window is None else self.window.selected(list(rows))\n"
        "        self._reload_window(self.length)\n",
        ("tests/operators/test_decode_on_cuda.py::test_beams_take_their_windows_with_them",),
    ),
    Mutation(
        "no plan counts the masks of layers without an operator",
        "hetero_kv/adapter/footprint.py",
        "        yield mask_share(demand.tokens, demand)\n",
        "",
        ("tests/test_planned_bytes.py::test_the_masks_of_layers_that_rules_leave_alone_are_planned",),
    ),
    Mutation(
        "the weights of a model that is larger than its GPU go there all the same",
        "hetero_kv/models/placing.py",
        "return free is not None and weights > _MOST_OF_GPU * free",
        "return False",
        (f"{_FITS}goes_where_its_setting_says", f"{_FITS}larger_than_its_gpu_answers_as_on_a_cpu"),
    ),
    Mutation(
        "nobody says why an old driver's GPU is not used",
        "hetero_kv/models/precision.py",
        'unused = "" if gpus else unused_gpu()',
        'unused = ""',
        ("tests/models/test_precision.py::test_a_gpu_that_torch_cannot_use_is_told_with_the_remedy",),
    ),
    Mutation(
        "flash-attn is used nowhere",
        "gpu_ops/attention_backend.py",
        'if backend == "auto" and is_half and has_flash_attn():',
        "if False:",
        (_KERNELS,),
    ),
    Mutation(
        "what an eviction leaves out is picked by a mask, of which a GPU tells the host how many it picks",
        "hetero_kv/families/bounded/eviction/ranking.py",
        "return gone.argsort(dim=-1, descending=True, stable=True)[..., : cached - count]",
        "return torch.arange(cached, device=gone.device).expand_as(gone)[gone.bool()].view(batch, kv_heads, -1)",
        ("tests/operators/test_bounded_on_cuda.py::test_evicted_entries_are_found_on_a_gpu_without_a_wait",),
    ),
    Mutation(
        "merging asks a GPU whether anything joins",
        "hetero_kv/families/bounded/eviction/cam.py",
        'if joins.device.type == "cpu" and not joins.any():',
        "if not joins.any():",
        ("tests/operators/test_bounded_on_cuda.py::test_no_bounded_layer_waits_or_copies_and_all_launch_little",),
    ),
    Mutation(
        "a range of DRAM is noted when it has been locked",
        "gpu_ops/mapped_memory.py",
        "            self._ranges.append(self._locked)\n"
        "        error = int(torch.cuda.cudart().cudaHostRegister(self._locked, stop - self._locked, _FLAGS))\n",
        "            pass\n"
        "        error = int(torch.cuda.cudart().cudaHostRegister(self._locked, stop - self._locked, _FLAGS))\n"
        "        self._ranges.append(self._locked)\n",
        ("tests/gpu_ops/test_mapped_memory.py::test_memory_locked_before_ctrl_c_is_known",),
    ),
    Mutation(
        "of an interrupted stream of weights some layers keep their part",
        "gpu_ops/layer_stream.py",
        '                    module.__dict__.pop("forward", None)\n',
        "                    pass\n",
        (f"{_STREAM}a_stream_is_there_for_all_modules_or_for_none",),
    ),
    Mutation(
        "a layer that Ctrl-C ends has its weights on the GPU still",
        "gpu_ops/layer_stream.py",
        "            self._stream.leave(self._number)\n        except BaseException:",
        "            self._stream.leave(self._number)\n        except Exception:",
        (f"{_STREAM}ctrl_c_in_a_streamed_layer_leaves_no_weight_on_the_gpu",),
    ),
    Mutation(
        "a copy of weights counts as made before it is under way",
        "gpu_ops/layer_stream.py",
        "        self._loaded[slot] = None\n",
        "        self._loaded[slot] = number\n",
        (f"{_STREAM}a_forward_that_is_interrupted_anywhere_leaves_weights_in_dram_and_the_next_one_right",),
    ),
    Mutation(
        "a step that fails lets go of what a side stream reads",
        "gpu_ops/side_stream.py",
        "            torch.cuda.current_stream(device).wait_stream(stream_for(_SIDE, device))\n        raise\n",
        "            pass\n        raise\n",
        ("tests/operators/test_shadowkv_on_cuda.py::test_memory_in_use_is_freed_after_its_last_read",),
    ),
    Mutation(
        "every piece of what is stored has room of its own on a GPU",
        "gpu_ops/prefetch.py",
        "        tensors = tensors_in(rooms[slot], kinds)\n",
        "        rooms[slot].record_stream(torch.cuda.current_stream(self._device))\n"
        "        with torch.cuda.stream(self._stream):\n"
        "            rooms[slot] = torch.empty_like(rooms[slot])\n"
        "        tensors = tensors_in(rooms[slot], kinds)\n",
        ("tests/gpu_ops/test_bus_transfers.py::test_two_pieces_are_on_the_device",),
    ),
    Mutation(
        "a piece of what is stored comes to lie where another is used",
        "gpu_ops/prefetch.py",
        "                    if following >= _SLOTS:",
        "                    if following > len(queue):",
        ("tests/gpu_ops/test_bus_transfers.py::test_two_pieces_are_on_the_device",),
    ),
    Mutation(
        "a GPU short of memory has no Triton from then on",
        "gpu_ops/kernel_choice.py",
        'if isinstance(error, MemoryError) or "out of memory" in str(error):',
        "if False:",
        ("tests/gpu_ops/test_kernel_choice.py::test_memory_that_runs_out_says_nothing_of_triton",),
    ),
    Mutation(
        "whether a token waits for the device is found out by capturing it",
        "hetero_kv/adapter/captured_steps.py",
        "if kind in self._uncapturable:",
        "if False:",
        (f"{_CAPTURES}uncapturable_layers_run_uncaptured_and_are_named",),
    ),
    Mutation(
        "torch is not told that a capture is over which CUDA has ended",
        "gpu_ops/graph_segments.py",
        "                _forget_capture(self._device, self._pool)",
        "                pass",
        (f"{_CAPTURES}a_capture_that_fails_leaves_torch_as_it_was",),
    ),
    Mutation(
        "the memory that torch keeps is not given back before a capture",
        "gpu_ops/graph_segments.py",
        "torch.cuda.empty_cache()",
        "pass",
        (f"{_CAPTURES}torchs_cached_memory_is_freed_before_a_capture",),
    ),
    Mutation(
        "a capture for which memory runs out is never tried again",
        "hetero_kv/adapter/captured_steps.py",
        "if is_out_of_memory(error):",
        "if False:",
        (f"{_CAPTURES}where_memory_runs_out_tokens_run_as_they_are_and_are_captured_later[auto]",),
    ),
    Mutation(
        "a capture is not ended where an interrupt comes as it has begun",
        "gpu_ops/graph_segments.py",
        "        self._graphs.append(torch.cuda.CUDAGraph())\n"
        "        # Other threads may continue with unrelated work.\n"
        '        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")\n',
        "        graph = torch.cuda.CUDAGraph()\n"
        '        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")\n'
        "        self._graphs.append(graph)\n",
        ("tests/simulated_cuda/test_graphs.py::test_an_interrupt_while_a_capture_begins_ends_it",),
    ),
)
