"""Results in bfloat16 of two ways, whose roundings differ by the CPU, beside that in float32."""

import torch


def require_as_exact(mine: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> None:
    """That `mine` is about as near to the result in float32, `exact`, as the other way's result is."""
    of_mine, of_other = (float((each.float() - exact).norm() / exact.norm()) for each in (mine, other))
    assert of_other < 0.1, (of_mine, of_other)
    assert of_mine < 2 * of_other, (of_mine, of_other)
