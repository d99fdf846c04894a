"""The kernels' inner loops compile to vector instructions, also for other processors than this one."""

import re
from dataclasses import replace

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from hetero_kv.cpu_ops.cpu_features import ISAS
from hetero_kv.cpu_ops.half_precision_weights import emit_number_tile
from hetero_kv.cpu_ops.simd import emit_accumulate_rows, emit_score_rows
from hetero_kv.cpu_ops.storage import STORAGE_TYPES
from hetero_kv.cpu_ops.tiles import tiles_for
from hetero_kv.cpu_ops.vectors import INT, Vectors
from hetero_kv.cpu_ops.weight_dots import emit_tile
from hetero_kv.cpu_ops.weight_formats import FORMATS

#: Triple, processor, and a multiply-add of whole vectors as its assembler writes it.
PROCESSORS = {
    "avx512": ("x86_64-linux-gnu", "znver5", r"vfmadd\w+\s.*%zmm\d+"),
    "avx2": ("x86_64-linux-gnu", "haswell", r"vfmadd\w+\s.*%ymm\d+"),
    "neon": ("aarch64-linux-gnu", "neoverse-n1", r"fmla\s+v\d+\.4s"),
    "generic": ("x86_64-linux-gnu", "x86-64", r"mulps\s.*%xmm\d+"),
}


def function(module, name, *parameters):
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), name)
    return ir.IRBuilder(made.append_basic_block()), made.args


def inner_loops(isa, storage, group=7, dim=64, block_size=128):
    """A module with both inner loops of attention, as the kernels are made of them."""
    tiles, module = tiles_for(isa, group, block_size), ir.Module()
    real = ir.FloatType().as_pointer()
    stored = real if storage == "float32" else ir.IntType(8 * STORAGE_TYPES[storage].kernel_dtype.itemsize).as_pointer()
    builder, (q, keys, scores) = function(module, "score", real, stored, real)
    v = Vectors(builder, tiles.lanes)
    emit_score_rows(v, storage, dim, tiles.queries, tiles.tokens, tiles.row, q, keys, scores)
    builder.ret_void()
    builder, (p, values, count, sums, ahead) = function(
        module, "accumulate", real, stored, INT, real, ir.IntType(8).as_pointer()
    )
    v = Vectors(builder, tiles.lanes)
    emit_accumulate_rows(v, storage, dim, tiles.queries, tiles.row, tiles.columns, 128, p, values, count, sums, ahead)
    builder.ret_void()
    return module


def assembly(module, triple, cpu):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    module.triple, module.data_layout = triple, str(machine.target_data)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


@pytest.mark.parametrize("storage", STORAGE_TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_inner_loops_are_vector_instructions(isa, storage):
    triple, cpu, multiply_add = PROCESSORS[isa]
    require_target(triple)
    text = assembly(inner_loops(isa, storage), triple, cpu)
    score, accumulate = re.split(r"\naccumulate:", text)
    assert re.search(multiply_add, score)
    assert re.search(multiply_add, accumulate)


#: By the dot product's name: triple, processor, the instruction, and how sixteen bytes of a table are looked up.
DOT_PRODUCTS = {
    "vnni512": ("x86_64-linux-gnu", "znver5", r"vpdpbusd\s.*%zmm\d+", r"vpshufb\s.*%zmm\d+"),
    "avx2": ("x86_64-linux-gnu", "haswell", r"vpmaddubsw\s.*%ymm\d+", r"vpshufb\s.*%ymm\d+"),
    "dotprod": ("aarch64-linux-gnu", "neoverse-n1", r"sdot\s+v\d+\.4s, v\d+\.16b", r"tbl\s+v\d+\.16b"),
    "generic": ("aarch64-linux-gnu", "cortex-a53", r"ml[as]\s+v\d+\.4s", r"bsl\s+v\d+\.16b|bi[tf]\s+v\d+\.16b"),
}


def require_target(triple):
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"llvmlite has no target {triple}")


@pytest.mark.parametrize("how", DOT_PRODUCTS)
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_NL", "IQ2_S"])
def test_products_with_codes_are_vector_instructions(name, how):
    triple, cpu, dot, lookup = DOT_PRODUCTS[how]
    require_target(triple)
    module = ir.Module()
    builder, arguments = function(module, "dots", *[INT] * 7)
    emit_tile(builder, FORMATS[name], 2, how, *arguments)
    builder.ret_void()
    text = assembly(module, triple, cpu)
    assert re.search(dot, text)
    assert bool(re.search(lookup, text)) or not FORMATS[name].table
    # Scales of float16 become float32 sixteen at a time, by no call of a function.
    assert not re.search(r"\b(call|bl)\s", text)


@pytest.mark.parametrize(("name", "change", "how"), [("Q4_K", {"zero": 8}, "avx2"), ("Q8_0", {}, "vnni512")])
def test_a_format_with_a_minimum_and_another_zero_is_refused(name, change, how):
    builder, arguments = function(ir.Module(), "dots", *[INT] * 7)
    layout = replace(FORMATS[name], has_minimum=True, **change)
    with pytest.raises(NotImplementedError, match=f"{name} has a minimum and zero is code (8|128); declare one"):
        emit_tile(builder, layout, 2, how, *arguments)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "generic"])
@pytest.mark.parametrize("number", ["float16", "bfloat16"])
def test_products_with_numbers_are_vector_instructions(number, isa):
    triple, cpu, multiply_add = PROCESSORS[isa]
    require_target(triple)
    module = ir.Module()
    builder, arguments = function(module, "dots", *[INT] * 5)
    emit_number_tile(builder, number, 2, 2, *arguments)
    builder.ret_void()
    text = assembly(module, triple, cpu)
    assert re.search(multiply_add, text)
    assert not re.search(r"\b(call|bl)\s", text)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", range(1, 17))
def test_tiles_cover_the_group_and_divide_the_block(isa, group):
    for block_size in (1, 5, 16, 96, 128):
        tiles = tiles_for(isa, group, block_size)
        assert tiles.full * tiles.queries + tiles.rest == group
        assert tiles.rest < tiles.queries <= tiles.row <= tiles.lanes
        assert tiles.lanes % tiles.row == block_size % tiles.tokens == 0
        assert tiles.queries * max(tiles.tokens, tiles.columns) <= ISAS[isa].registers
