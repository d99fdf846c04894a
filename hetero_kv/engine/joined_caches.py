"""Several caches of one model as one, for a forward of each one's next tokens, and of parts of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.engine.exclusive_use import ExclusiveUse
from hetero_kv.engine.forward_request import ForwardRequest
from hetero_kv.engine.padding_mask import PaddingMask
from hetero_kv.engine.rollback import rollback_on_error, rollback_point
from hetero_kv.engine.step import PromptPart
from hetero_kv.engine.token_rows import NewTokens, TokenRows
from hetero_kv.errors import HeteroKVError


class PromptTokens(NamedTuple):
    """A part of a prompt in one forward with decoded tokens, or with other prompts.

    Attributes:
        cache: of the prompt; one row.
        tokens: how many tokens it has.
        part: which part of the prompt they are.
    """

    cache: HeteroCache
    tokens: int
    part: PromptPart


@contextmanager
def joined(
    caches: Rows[HeteroCache], prompts: Rows[PromptTokens] = (), tokens: Rows[int] | None = None,
    draft_blocks: Rows[DraftBlocks] = (),
) -> Iterator[HeteroCache]:  # fmt: skip
    """Within this context one cache has the rows of all `caches`, in their order, for each one's next tokens.

    It can be used for one forward. Prompts, and several tokens of a cache, are further rows of the call (`TokenRows`).
    There may be prompts alone.

    Each cache keeps its own blocks and layers. After an exception all of them are what they were before.

    Args:
        tokens: the number of next tokens of each cache; None for one per row. A cache with several has one row.
        draft_blocks: of each cache, for a forward that guesses; caches have one row then.

    Raises HeteroKVError for caches of several models or depths, or without tokens, and CacheInUseError when another
    thread uses one of them.
    """
    everything = [*caches, *(prompt.cache for prompt in prompts)]
    first = everything[0]
    for cache in (*caches, *(prompt.cache for prompt in prompts if prompt.cache.columns.count)):
        is_other_depth = cache.depth and first.depth and cache.depth != first.depth
        if cache.injection is not first.injection or is_other_depth:
            raise HeteroKVError("only caches of one injected model, with tokens of equal depth, can be joined")
    for cache in caches:
        if not cache.columns.count:
            raise HeteroKVError("a cache without tokens cannot decode; prefill a prompt into it first")
    counts = [1] * len(caches) if tokens is None else list(tokens)
    joint: HeteroCache = object.__new__(HeteroCache)
    joint.__dict__.update(first.__dict__)
    joint.in_use, joint.on_progress, joint.columns, joint.go_back = ExclusiveUse(), None, PaddingMask(), None
    joint.mapped_files = tuple({id(file): file for cache in everything for file in cache.mapped_files}.values())
    joint._set_groups([group for cache in caches for group in cache.groups])
    with ExitStack() as used:
        for cache in caches:
            used.enter_context(cache.in_use)
        new_tokens = [
            NewTokens(group, count) for cache, count in zip(caches, counts, strict=True) for group in cache.groups
        ]
        for prompt in prompts:
            used.enter_context(prompt.cache.in_use)
            new_tokens.append(prompt.cache.begin_mixed(prompt.tokens, prompt.part))
            joint._set_groups([*joint.groups, *prompt.cache.groups])
        is_by_row = bool(prompts) or max(counts) > 1
        rows = TokenRows(new_tokens) if is_by_row else None
        joint.batch, joint.request = None, ForwardRequest(rows=rows, draft_blocks=tuple(draft_blocks))
        joint.go_back = rollback_point(joint)
        # It refers to the joint cache.
        used.callback(setattr, joint, "go_back", None)
        with rollback_on_error(joint, joint.go_back):
            yield joint
        for cache, count in zip(caches, counts, strict=True):
            cache.columns = cache.columns.grown(count, [count] * len(cache.sequences))
            cache.depth = joint.depth
            cache.record_adapters()
        for prompt in prompts:
            prompt.cache.columns = prompt.cache.columns.grown(prompt.tokens, [prompt.tokens])
            prompt.cache.depth = joint.depth
