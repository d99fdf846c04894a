"""Later turns at grouped positions on a GPU: the past arrives in pieces, and is never there as a whole."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.families.gpu_prefill import pieces
from tests.support.devices import model_on, simulated_cuda
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_thread")]

#: kv heads and head dim of the tiny Llama.
HEADS, DIM = 2, 16
ENGINE = {"max_seq_len": 1024, "chunk_size": 32, "threads_num": 1}
GROUPED = {"block_size": 8, "sink_tokens": 8, "local_windows_len": 24, "position_group": 4, "neighbour_window": 20}
STREAM = {
    "block_size": 8, "sink_tokens": 8, "local_windows_len": 24, "top_k_blocks": 4, "representative_num": 2,
    "stream_chunk": 16,
}  # fmt: skip
RUNS = [
    ("self_extend", GROUPED),
    ("self_extend_quest", {**GROUPED, "top_k_blocks": 4, "dense_layer_num": 0}),
    ("infllm_stream", STREAM),
    ("infllm_stream", {**STREAM, "head_select_mode": "SEPARATE"}),
    ("infllm_stream", {**STREAM, "top_k_blocks": 500}),
]
# Types in groups of 32 numbers want blocks of as many tokens.
LARGE = {"block_size": 32, "sink_tokens": 32, "local_windows_len": 32}
FEW = {"top_k_blocks": 2}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(pieces, "_TOKENS_AT_ONCE", 32)
    with simulated_cuda() as simulation:
        yield simulation


def on_gpu(model):
    return model_on(torch.device("cuda", 0), model)


def logits(model, cache, *parts):
    with torch.no_grad():
        return torch.cat([model(part.to(model.device), past_key_values=cache).logits for part in parts], dim=1).cpu()


def random_tokens(count, rows=1):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("recipe", "settings", "kv_type"),
    [
        # Quick is the stream whose numbers are in groups: what each of the others has is in it, or tested on a CPU.
        *(
            pytest.param(*run, kv_type, marks=pytest.mark.slow)
            for run, kv_type in zip(RUNS, ("FP32", "FP16", "FP32", "FP16", "FP32"), strict=True)
        ),
        *(
            pytest.param(recipe, {**settings, **LARGE, **few}, "Q8_0", marks=pytest.mark.slow if number == 0 else ())
            for number, ((recipe, settings), few) in enumerate(((RUNS[0], {}), (RUNS[2], FEW)))
        ),
    ],
)
def test_a_later_turn_in_pieces_answers_as_one_on_a_cpu(recipe, settings, kv_type):
    # Types in groups of 32 numbers want heads of 32 channels.
    plain = tiny_model("llama", num_hidden_layers=2, **({"head_dim": 32} if kv_type == "Q8_0" else {}))
    # The first prompt is shorter than the window, the third shorter than a block; the last one is cut off and repeated.
    parts = random_tokens(193, rows=2).split([19, *[1] * 2, 59, *[1] * 2, 7, *[1] * 2, 52, *[1] * 2, 48], dim=1)
    found = []
    for model in (plain, on_gpu(plain)):
        inject(model, recipe, command_line={**ENGINE, **settings, "kv_type": kv_type})
        cache = HeteroCache(model)
        whole = logits(model, cache, *parts)
        cache.crop(-31)
        found.append(torch.cat([whole, logits(model, cache, *parts[-3:])], dim=1))
        eject(model)
    assert float((found[1] - found[0]).abs().max() / found[0].abs().max()) < (1e-4 if kv_type == "FP32" else 2e-3)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [pytest.param(*run, marks=pytest.mark.slow if number in (1, 2, 3, 4) else ()) for number, run in enumerate(RUNS)],
)
def test_a_later_turn_never_has_the_past_on_the_device(gpu, recipe, settings):
    past = 1000
    model = on_gpu(tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16))
    inject(model, recipe, command_line={**ENGINE, **settings, "kv_type": "FP16"})
    cache = HeteroCache(model)
    logits(model, cache, random_tokens(past))
    turn = random_tokens(24).to(model.device)
    live = torch.cuda.memory_allocated()
    gpu.record.clear()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(turn, past_key_values=cache)
    of_one_layer = 2 * HEADS * DIM * 2 * past
    # What chunks compute with is there at most; vectors of blocks are an eighth of the keys, in float32 a fourth.
    assert torch.cuda.max_memory_allocated() - live < of_one_layer / 2
    assert gpu.record.pageable == []
