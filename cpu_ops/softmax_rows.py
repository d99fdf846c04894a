"""The online softmax over scores with queries in the lanes: sums across lanes are deferred to the end of a list."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.vectors import Vectors, array_pointer, integer, offset

_CHAINS = 4


@intrinsic(prefer_literal=True)
def rows_most(typingctx, lanes, row, scores, s_at, stride, vectors, most, m_at, fresh, f_at):
    """Update running maxima: fresh[lane] = max(most[lane], all scores of the same query in `vectors` whole vectors).

    A vector begins every `stride` numbers; its lane i belongs to query i % row. Returns whether any maximum has grown.
    """
    width, pitch = lanes.literal_value, row.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        s_pointer = array_pointer(context, builder, scores, arguments[2], arguments[3])
        before = v.load(array_pointer(context, builder, most, arguments[6], arguments[7]))
        # Four independent chains hide the latency of a maximum.
        largest, step = v.slots([before] * _CHAINS), arguments[4]
        whole = builder.sub(arguments[5], builder.urem(arguments[5], integer(_CHAINS)))

        def add(slot: ir.Value, vector: ir.Value) -> None:
            scored = v.load(offset(builder, s_pointer, builder.mul(vector, step)))
            builder.store(v.maximum(builder.load(slot), scored), slot)

        with cgutils.for_range_slice(builder, integer(0), whole, integer(_CHAINS)) as (first, _):
            for each, slot in enumerate(largest):
                add(slot, builder.add(first, integer(each)))
        with cgutils.for_range_slice(builder, whole, arguments[5], integer(1)) as (vector, _):
            add(largest[0], vector)
        found, distance = builder.load(largest[0]), pitch
        for slot in largest[1:]:
            found = v.maximum(found, builder.load(slot))
        while distance < width:
            found = v.maximum(found, v.across(found, distance))
            distance *= 2
        v.store(found, array_pointer(context, builder, fresh, arguments[8], arguments[9]))
        bits = builder.bitcast(builder.fcmp_ordered(">", found, before), ir.IntType(width))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    at = types.int64
    return types.boolean(lanes, row, scores, at, at, at, most, at, fresh, at), codegen


@intrinsic(prefer_literal=True)
def rows_exp2(typingctx, lanes, scores, s_at, stride, vectors, most, m_at, totals, t_at):
    """Replace scores by 2 ** (score - most[lane]) and add them to totals[lane]; vectors as for `rows_most`."""
    width = lanes.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        v = Vectors(builder, width)
        s_pointer = array_pointer(context, builder, scores, arguments[1], arguments[2])
        shift = v.load(array_pointer(context, builder, most, arguments[5], arguments[6]))
        t_pointer = array_pointer(context, builder, totals, arguments[7], arguments[8])
        total = v.slots([v.load(t_pointer)])[0]
        with cgutils.for_range(builder, arguments[4]) as loop:
            place = offset(builder, s_pointer, builder.mul(loop.index, arguments[3]))
            weight = v.exp2(builder.fsub(v.load(place), shift))
            v.store(weight, place)
            builder.store(builder.fadd(builder.load(total), weight), total)
        v.store(builder.load(total), t_pointer)
        return context.get_dummy_value()

    at = types.int64
    return types.none(lanes, scores, at, at, at, most, at, totals, at), codegen
