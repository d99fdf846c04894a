"""Vector operations of the kernels, on every instruction set of this CPU."""

import numpy as np
import pytest
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from hetero_kv.cpu_ops.cpu_features import ISAS, available
from hetero_kv.cpu_ops.vectors import Vectors, array_pointer


@intrinsic(prefer_literal=True)
def powers_of_two(typingctx, lanes, coarse, x, at, out):
    """out[at + i] = 2 ** x[at + i] for i < lanes."""
    width, is_coarse = lanes.literal_value, bool(coarse.literal_value)

    def codegen(context, builder, signature, arguments):
        v = Vectors(builder, width)
        source, place = (
            array_pointer(context, builder, signature.args[each], arguments[each], arguments[3]) for each in (2, 4)
        )
        v.store(v.exp2(v.load(source), is_coarse), place)
        return context.get_dummy_value()

    return types.none(lanes, coarse, x, types.int64, out), codegen


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("coarse", "allowed"), [(0, 3e-7), (1, 5e-6)])
def test_powers_of_two_are_as_accurate_as_they_say(isa, coarse, allowed):
    lanes = ISAS[isa].float_lanes

    @njit
    def powers(x, out):
        for at in range(0, x.size, lanes):
            powers_of_two(lanes, coarse, x, at, out)

    x = np.linspace(-125, 127, 1 << 16, dtype=np.float32)
    x[:4] = -np.inf, -3e38, -151, 0
    ours = np.empty_like(x)
    powers(x, ours)
    assert not ours[:3].any()
    assert ours[3] == pytest.approx(1, rel=allowed)
    np.testing.assert_allclose(ours[3:], 2.0 ** x[3:].astype(np.float64), rtol=allowed)
