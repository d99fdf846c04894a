"""Builds the error for a forward that runs out of memory although the plan had found room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hetero_kv.errors import OutOfMemoryError, brief_error, is_out_of_memory
from hetero_kv.planning.plan import Plan


def ran_out_of_memory(
    planned: Callable[[], Plan],
    error: Exception,
    *,
    stored: int,
    tokens: int,
    capacity: int | None,
    stored_bytes: int,
    chunk_size: int,
) -> OutOfMemoryError:
    """The error for a forward that ran out of memory and was rolled back.

    Args:
        planned: makes a plan by the memory that is free now.
        error: the original exception.
        stored: tokens of each sequence before the forward.
        tokens: new tokens.
        capacity: the planned capacity of the block store, tokens; None if unbounded.
        stored_bytes: DRAM of the stored blocks, bytes.
        chunk_size: tokens that a layer computes at once.
    """
    try:
        plan = planned()
        fitting = replace(plan, dram=plan.dram + stored_bytes).largest()
    except (MemoryError, RuntimeError) as another:
        if not is_out_of_memory(another):
            raise
        room = "too little to plan a length that fits: free some, or shorten the input"
    else:
        room = f"{_free(plan)}; {_remedy(fitting, stored, tokens, capacity)}"
    return OutOfMemoryError(
        f"memory ran out ({brief_error(error)}): none of {tokens} tokens was added to the {stored} stored ones; free "
        f"is {room}, or set chunk_size to less than {chunk_size}"
    )


def _free(plan: Plan) -> str:
    gpu = "" if plan.gpu is None else f" and {plan.gpu / 1e9:.2f} GB of the GPU's memory"
    return f"{plan.dram / 1e9:.2f} GB of DRAM{gpu}"


def _remedy(fitting: int, stored: int, tokens: int, capacity: int | None) -> str:
    """The remedy if a context of `fitting` tokens fits."""
    if stored + tokens <= fitting < (capacity or 0):
        return f"blocks for max_seq_len {capacity} need more: set max_seq_len to {fitting}"
    if stored + tokens <= fitting:
        return "which suffices by the plan, so another program took memory in the meantime: try again"
    if fitting > stored:
        return f"shorten the input to about {fitting - stored} tokens, or set max_seq_len to {fitting}"
    return "no more tokens fit: begin a new conversation, take a smaller model"
