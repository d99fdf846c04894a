"""Block attention equals attention over the gathered tokens, computed in float64."""

from typing import NamedTuple

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops import list_attention
from hetero_kv.cpu_ops.attention import attend_blocks, compile_for
from hetero_kv.cpu_ops.cpu_features import available, forced_isa
from hetero_kv.cpu_ops.exponential import exp2, log2, tanh
from hetero_kv.cpu_ops.merge import merge_partials
from hetero_kv.cpu_ops.storage import BFLOAT16, Q4_0, Q8_0
from tests.support.slow_variants import with_slow
from tests.support.storage_formats import decoded, encoded

NUM_BLOCKS, MAX_BLOCKS = 24, 20


class Shape(NamedTuple):
    kv_heads: int
    group: int
    k_dim: int
    v_dim: int
    block_size: int
    dtype: np.dtype | type
    softcap: float = 0.0
    value_dtype: np.dtype | type | None = None


#: The tiny models' shape, whose kernel other tests have compiled.
TINY = Shape(2, group=2, k_dim=16, v_dim=16, block_size=32, dtype=np.float32)
#: Groups of one tile, of several and of a rest, dims that are whole vectors and not, of every storage type but fp32.
WIDTH_SHAPES = {
    "group of 7, q4_0": Shape(2, group=7, k_dim=256, v_dim=64, block_size=32, dtype=Q4_0),
    "group of 9, q8_0": Shape(1, group=9, k_dim=96, v_dim=96, block_size=6, dtype=Q8_0),
    "group of 12, soft-capped, bf16": Shape(
        1, group=12, k_dim=64, v_dim=64, block_size=32, dtype=BFLOAT16, softcap=2.0
    ),
    "group of 16, fp16": Shape(2, group=16, k_dim=80, v_dim=192, block_size=7, dtype=np.float16),
}
SHAPES = {
    "tiny": TINY,
    "llama, fp16": Shape(kv_heads=2, group=4, k_dim=128, v_dim=128, block_size=128, dtype=np.float16),
    "mla, fp32": Shape(kv_heads=3, group=1, k_dim=192, v_dim=128, block_size=32, dtype=np.float32),
    "odd sizes, soft-capped, fp32": Shape(1, 3, k_dim=20, v_dim=28, block_size=5, dtype=np.float32, softcap=1.5),
    "odd sizes, bf16": Shape(1, 3, k_dim=20, v_dim=28, block_size=5, dtype=BFLOAT16),
    "qwen2 0.5b, q8_0": Shape(2, 7, k_dim=64, v_dim=64, block_size=64, dtype=Q8_0, softcap=2.0),
    "mla, q4_0": Shape(3, 1, k_dim=192, v_dim=128, block_size=32, dtype=Q4_0),
    "q8_0 keys, q4_0 values": Shape(2, 7, k_dim=64, v_dim=64, block_size=32, dtype=Q8_0, value_dtype=Q4_0),
    "fp16 keys, q4_0 values": Shape(2, 3, k_dim=64, v_dim=32, block_size=32, dtype=np.float16, value_dtype=Q4_0),
    "blocks of 16, q8_0": Shape(2, group=7, k_dim=64, v_dim=64, block_size=16, dtype=Q8_0),
    "heads of half a cache line, q4_0": Shape(3, group=2, k_dim=32, v_dim=96, block_size=16, dtype=Q4_0),
    "blocks of one token, fp32": Shape(2, group=6, k_dim=16, v_dim=16, block_size=1, dtype=np.float32),
    **WIDTH_SHAPES,
}
shapes = pytest.mark.parametrize(
    "shape",
    with_slow(
        SHAPES,
        slow=(
            "llama, fp16",
            # A group of one query, and values of other dims than keys: DeepSeek's, whose logits models' tests compare.
            "mla, fp32",
            "odd sizes, soft-capped, fp32",
            "mla, q4_0",
            "qwen2 0.5b, q8_0",
            "blocks of 16, q8_0",
            # Keys of one type and values of another are in tests/operators/test_storage_types.py.
            "q8_0 keys, q4_0 values",
            "fp16 keys, q4_0 values",
            "odd sizes, bf16",
            "heads of half a cache line, q4_0",
            "blocks of one token, fp32",
            # Its keys less an offset are attended to below.
            "group of 7, q4_0",
            # A group of 7 has several tiles too, and tests/operators/test_storage_types.py has the types.
            "group of 9, q8_0",
            "group of 12, soft-capped, bf16",
            "group of 16, fp16",
        ),
    ),
)


def reference(q, keys, values, block_ids, block_counts, block_lengths, scale, softcap):
    """Softmax attention in float64 over the tokens of each list, gathered one after the other."""
    keys, values = decoded(keys), decoded(values)
    out = np.zeros((*q.shape[:3], values.shape[3]))
    lse = np.full(q.shape[:3], -np.inf)
    for row, head in np.ndindex(q.shape[:2]):
        which = min(head, block_ids.shape[1] - 1)
        ids = block_ids[row, which, : block_counts[row, which]]
        if block_lengths[ids].sum() == 0:
            continue
        k = np.concatenate([keys[b, head, : block_lengths[b]] for b in ids]).astype(np.float64)
        v = np.concatenate([values[b, head, : block_lengths[b]] for b in ids]).astype(np.float64)
        scores = q[row, head].astype(np.float64) @ k.T * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        most = scores.max(axis=1)
        p = np.exp(scores - most[:, None])
        out[row, head] = p @ v / p.sum(axis=1, keepdims=True)
        lse[row, head] = most + np.log(p.sum(axis=1))
    return out, lse


def problem(shape, rows, separate, seed):
    """Random arguments of `attend_blocks` with partial, empty and repeated blocks and lists of all lengths."""
    rng = np.random.default_rng(seed)
    heads, size = shape.kv_heads, shape.block_size
    q = rng.standard_normal((rows, heads, shape.group, shape.k_dim), np.float32)
    keys = encoded(rng.standard_normal((NUM_BLOCKS, heads, size, shape.k_dim), np.float32), shape.dtype)
    values = encoded(
        rng.standard_normal((NUM_BLOCKS, heads, size, shape.v_dim), np.float32), shape.value_dtype or shape.dtype
    )
    lengths = rng.choice([0, 1, size - 1, size, rng.integers(0, size + 1)], NUM_BLOCKS).astype(np.int32)
    lists = heads if separate else 1
    ids = rng.integers(0, NUM_BLOCKS, (rows, lists, MAX_BLOCKS)).astype(np.int32)
    counts = rng.choice([0, 1, MAX_BLOCKS, rng.integers(0, MAX_BLOCKS + 1)], (rows, lists)).astype(np.int32)
    return q, keys, values, ids, counts, lengths, shape.k_dim**-0.5, shape.softcap


def assert_close(result, expected, arguments):
    out, lse = result
    want_out, want_lse = expected
    np.testing.assert_allclose(out, want_out, rtol=0, atol=3e-6 * np.abs(decoded(arguments[2])).max())
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[finite], want_lse[finite], rtol=1e-6, atol=3e-6)


@shapes
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 3), separate=st.booleans(), threads=st.sampled_from([1, 2, None]), seed=st.integers(0, 2**32)
)
def test_block_attention_equals_attention_over_the_gathered_tokens(shape, rows, separate, threads, seed):
    arguments = problem(shape, rows, separate, seed)
    threads = threads and min(threads, numba.config.NUMBA_NUM_THREADS)
    assert_close(attend_blocks(*arguments, threads=threads), reference(*arguments), arguments)


def offsets_of(keys, k_dim, seed):
    """An offset for the keys of each block and head, larger than they are: [num_blocks, kv_heads, k_dim] float16."""
    return np.random.default_rng(seed).normal(scale=3, size=(*keys.shape[:2], k_dim)).astype(np.float16)


_WITH_OFFSETS = [(name, isa) for name in ("qwen2 0.5b, q8_0", "group of 7, q4_0") for isa in available()[:2]]


@pytest.mark.parametrize(("name", "isa"), with_slow(_WITH_OFFSETS, slow=_WITH_OFFSETS[:2] + _WITH_OFFSETS[3:]))
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 2), separate=st.booleans(), threads=st.sampled_from([1, None]), seed=st.integers(0, 2**32))
def test_keys_less_an_offset_are_attended_to_as_with_it(name, isa, rows, separate, threads, seed):
    q, keys, values, *lists = problem(SHAPES[name], rows, separate, seed)
    offsets = offsets_of(keys, SHAPES[name].k_dim, seed)
    with forced_isa(isa):
        actual = attend_blocks(q, keys, values, *lists, threads=threads, key_offsets=offsets.view(np.uint16))
    expected = reference(q, decoded(keys) + offsets[:, :, None], values, *lists)
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(NUM_BLOCKS, 2, 40), (NUM_BLOCKS, 2, 80, 1), (NUM_BLOCKS - 1, 2, 80)])
def test_offsets_that_fit_no_keys_are_refused(shape):
    with pytest.raises(ValueError, match=r"key_offsets .* do not fit keys"):
        attend_blocks(*problem(SHAPES["group of 16, fp16"], 1, False, 5), key_offsets=np.zeros(shape, np.uint16))


# The other tests have the machine's best width, and `test_keys_less_an_offset...` its second best, of one shape.
@pytest.mark.parametrize("isa", with_slow(available(), slow=available()))
@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from(list(WIDTH_SHAPES.values())),
    rows=st.integers(1, 2),
    separate=st.booleans(),
    threads=st.sampled_from([1, None]),
    seed=st.integers(0, 2**32),
)
def test_every_vector_width_computes_the_same(isa, shape, rows, separate, threads, seed):
    arguments = problem(shape, rows, separate, seed)
    with forced_isa(isa):
        assert_close(attend_blocks(*arguments, threads=threads), reference(*arguments), arguments)


def test_kernels_of_different_widths_are_kept_apart():
    shape = TINY.group, TINY.k_dim, TINY.v_dim, TINY.block_size
    kernels = [list_attention.region(isa, "float32", "float32", *shape, False, False) for isa in available()[:2]]
    keys = [kernel._cache._index_key(kernel.signatures[0], kernel.targetctx.codegen()) for kernel in kernels]
    assert len(set(keys)) == len(kernels)


@shapes
def test_results_are_written_into_the_output_arrays(shape):
    arguments = problem(shape, 2, True, 0)
    out = np.full((2, shape.kv_heads, shape.group, shape.v_dim), np.nan, np.float32)
    lse = np.full(out.shape[:3], np.nan, np.float32)
    result = attend_blocks(*arguments, out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    assert_close((out, lse), reference(*arguments), arguments)


@shapes
def test_merging_two_halves_of_the_lists_equals_attending_to_all(shape):
    q, keys, values, ids, counts, lengths, scale, softcap = problem(shape, 2, False, 1)
    counts[:] = MAX_BLOCKS
    half = np.full_like(counts, MAX_BLOCKS // 2)
    parts = [
        attend_blocks(q, keys, values, np.ascontiguousarray(part), half, lengths, scale, softcap)
        for part in (ids[..., : MAX_BLOCKS // 2], ids[..., MAX_BLOCKS // 2 :])
    ]
    merged = merge_partials(np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts]))
    arguments = (q, keys, values, ids, counts, lengths, scale, softcap)
    assert_close(merged, reference(*arguments), arguments)


@pytest.mark.parametrize("shape", with_slow({"tiny": TINY, "mla, fp32": SHAPES["mla, fp32"]}, slow=["mla, fp32"]))
@pytest.mark.parametrize("magnitude", [1e4, -1e4, 0.0])
def test_extreme_scores_stay_finite_and_exact(magnitude, shape):
    q, keys, values, ids, counts, lengths, _, _ = problem(shape, 1, False, 2)
    counts[:], lengths[:] = MAX_BLOCKS, 32
    keys[:] = 0
    keys[..., 0] = magnitude
    q[..., 0] = 1
    arguments = (q, keys, values, ids, counts, lengths, 1.0, 0.0)
    assert_close(attend_blocks(*arguments), reference(*arguments), arguments)


def test_one_dominating_key_returns_its_value():
    q, keys, values, ids, counts, lengths, _, _ = problem(TINY, 1, False, 3)
    counts[:], lengths[:], q[..., 0] = MAX_BLOCKS, 32, 1
    ids[:] = np.arange(MAX_BLOCKS)
    keys[:] = 0
    keys[7, :, 11, 0] = 1e4
    out, lse = attend_blocks(q, keys, values, ids, counts, lengths, 1.0)
    np.testing.assert_array_equal(out[0, :, 0], values[7, :, 11])
    np.testing.assert_allclose(lse, 1e4)


def test_garbage_past_a_blocks_length_is_never_seen():
    q, keys, values, ids, counts, lengths, scale, _ = problem(TINY, 1, False, 4)
    counts[:], lengths[:] = MAX_BLOCKS, 5
    out, lse = attend_blocks(q, keys, values, ids, counts, lengths, scale)
    keys[:, :, 5:], values[:, :, 5:] = np.nan, np.inf
    out_beside_garbage, lse_beside_garbage = attend_blocks(q, keys, values, ids, counts, lengths, scale)
    np.testing.assert_array_equal(out_beside_garbage, out)
    np.testing.assert_array_equal(lse_beside_garbage, lse)


def _without(name, value):
    names = ("q", "keys", "values", "block_ids", "block_counts", "block_lengths")
    arguments = dict(zip(names, problem(TINY._replace(block_size=8), 1, False, 5)[:6], strict=True))
    arguments[name] = value(arguments[name])
    return arguments


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("keys", lambda a: a[:, :1], ValueError, "kv_heads"),
        ("values", lambda a: a[:, :, :4], ValueError, "do not fit keys"),
        ("values", lambda a: a.astype(np.float64), TypeError, "values are float64"),
        ("keys", lambda a: a.astype(np.float64), TypeError, "keys are float64"),
        ("block_ids", lambda a: a[:, 0], ValueError, "max_blocks"),
        ("block_lengths", lambda a: a[:-1], ValueError, "one entry for each"),
        ("q", lambda a: a.astype(np.float64), TypeError, "q is float64"),
        ("q", lambda a: np.asfortranarray(a), TypeError, "not C-contiguous"),
        ("block_ids", lambda a: a * 0 + NUM_BLOCKS, IndexError, f"0..{NUM_BLOCKS - 1}"),
        ("block_ids", lambda a: a * 0 - 1, IndexError, "block_ids"),
        ("block_counts", lambda a: a * 0 + MAX_BLOCKS + 1, IndexError, f"0..{MAX_BLOCKS} entries"),
        ("block_lengths", lambda a: a * 0 + 9, IndexError, "0..8"),
    ],
)
def test_arrays_that_do_not_fit_are_named(name, value, error, message):
    arguments = _without(name, value)
    if name != "block_counts":
        arguments["block_counts"] = arguments["block_counts"] * 0 + MAX_BLOCKS
    with pytest.raises(error, match=message):
        attend_blocks(**arguments, scale=1.0)


def test_more_threads_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="threads is 100000"):
        attend_blocks(*problem(TINY, 1, False, 6), threads=100_000)


def test_compiling_for_an_unknown_storage_type_names_the_known_ones():
    with pytest.raises(ValueError, match="'int3' is not one of float32, float16"):
        compile_for(4, 128, 128, 128, storage="int3")


def test_exp2_and_tanh_are_accurate_to_float32():
    x = np.linspace(-125, 60, 50_001, dtype=np.float32)
    ours = np.array([exp2(each) for each in x])
    np.testing.assert_allclose(ours, 2.0 ** x.astype(np.float64), rtol=3e-7)
    x = np.concatenate([np.linspace(-12, 12, 50_001), np.geomspace(1e-30, 1, 1000)]).astype(np.float32)
    ours = np.array([tanh(each) for each in x])
    np.testing.assert_allclose(ours, np.tanh(x.astype(np.float64)), rtol=5e-7)
    assert exp2(np.float32(-np.inf)) == 0


def test_log2_is_accurate_to_float32():
    x = np.concatenate([np.geomspace(2.0**-126, 1e38, 50_001), np.linspace(0.6, 1.6, 10_001)]).astype(np.float32)
    ours = np.array([log2(each) for each in x])
    np.testing.assert_allclose(ours, np.log2(x.astype(np.float64)), rtol=3e-7, atol=3e-7)
    assert [log2(np.float32(power)) for power in (0.5, 1, 8)] == [-1, 0, 3]
