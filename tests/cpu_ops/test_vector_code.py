"""The kernels' inner loops become vector instructions of the processors they are written for, this one or not."""

import re

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from cpu_ops.cpu_features import ISAS
from cpu_ops.simd import emit_accumulate_rows, emit_score_rows
from cpu_ops.storage import STORAGE_TYPES
from cpu_ops.tiles import tiles_for
from cpu_ops.vectors import INT, Vectors

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
    try:
        llvm.initialize_all_targets()
        llvm.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"llvmlite has no target {triple}")
    text = assembly(inner_loops(isa, storage), triple, cpu)
    score, accumulate = re.split(r"\naccumulate:", text)
    assert re.search(multiply_add, score)
    assert re.search(multiply_add, accumulate)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", range(1, 17))
def test_tiles_cover_the_group_and_divide_the_block(isa, group):
    for block_size in (1, 5, 16, 96, 128):
        tiles = tiles_for(isa, group, block_size)
        assert tiles.full * tiles.queries + tiles.rest == group
        assert tiles.rest < tiles.queries <= tiles.row <= tiles.lanes
        assert tiles.lanes % tiles.row == block_size % tiles.tokens == 0
        assert tiles.queries * max(tiles.tokens, tiles.columns) <= ISAS[isa].registers
