"""The forwards of serving: a part of a prompt, a token of every row, and both together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import Cache

from hetero_kv.adapter.cache_argument import cache_name
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.foreign import has_global_hooks, has_hooks, has_own_hooks
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.contexts.active_tensors import frequencies_change
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.engine.drafted_tokens import DraftedTokens
from hetero_kv.engine.interrupts import run_to_completion
from hetero_kv.engine.joined_caches import PromptTokens, joined
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.likeliest import Likeliest, LikeliestRequest
from hetero_kv.engine.recurrent_state import StateBeside
from hetero_kv.engine.rollback import rollback_point
from hetero_kv.engine.step import PromptPart
from hetero_kv.engine.store import Store
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.serving.part_size import SMALL, SMALL_BY_TILES


@dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of a prompt, which follow those in a cache.

    Attributes:
        cached: how many of the prompt's first tokens are reused from another request, and not computed as this one's
            prompt.
        question: how many of the prompt's last tokens are its question (`HeteroCache.asking`).
    """

    prompt: Sequence[int]
    start: int
    stop: int
    cached: int
    question: int | None

    @property
    def tokens(self) -> list[int]:
        """The ids of its tokens."""
        return list(self.prompt[self.start : self.stop])

    @property
    def is_first(self) -> bool:
        """Whether it begins the prompt."""
        return self.start == self.cached

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.stop == len(self.prompt)


class ModelForward:
    """Calls a model for the engine, a conversation or an evaluation.

    Args:
        model: a causal language model. Several rows, and parts of prompts, need one after `inject`; an untouched one
            uses transformers' caches.
        tokenizer: the model's, for policies that run a text of their own; None if `new_cache` is not called.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self._tokenizer = model, tokenizer
        arguments = inspect.signature(model.forward).parameters
        # The logits of a whole prompt would take a hundred times the memory of its keys and values.
        self._last_logits: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self._takes_positions = "position_ids" in arguments
        self._cache_name = cache_name(model.forward)

    @cached_property
    def longest_rotates_all(self) -> bool:
        """Whether the longest row of a forward determines the RoPE frequencies of all rows."""
        return frequencies_change(self.model)

    @cached_property
    def _is_token_wise(self) -> bool:
        return not self.longest_rotates_all and _mixes(self.model)

    @cached_property
    def _one_by_one(self) -> str | None:
        """An operator that decodes one token at a time; None if there is none."""
        found = (f"{each.path} ({type(each).__name__})" for each in _operators(self.model) if not each.decodes_drafts)
        return next(found, None)

    @cached_property
    def _by_prompt(self) -> str | None:
        """An operator whose result for a token depends on the other tokens of the forward; None if there is none."""
        found = (f"{each.path} ({type(each).__name__})" for each in _operators(self.model) if not _is_exact(each))
        return next(found, None)

    @cached_property
    def splits_prompts(self) -> bool:
        """Whether a prompt that is computed in parts gives what it gives as a whole."""
        return (
            all(each.prefills_exactly for each in _operators(self.model))
            and not any(getattr(each, "is_strided", False) for each in self.model.hetero_kv_injection.cache_layers())
            and not self.longest_rotates_all
        )

    @property
    def mixes(self) -> bool:
        """Whether parts of prompts can be computed in one forward with decoded tokens."""
        return self._is_token_wise and not has_hooks(self.model, ChunkedDecoderLayer)

    @property
    def pauses(self) -> bool:
        """Whether other forwards of the model may run between two chunks of a prompt.

        On a GPU the prompt's kernels, copies and captured tokens would wait for each other; frequencies that change
        are the model's.
        """
        return self._reports_chunks and not self.longest_rotates_all and not self.is_hooked

    @cached_property
    def _reports_chunks(self) -> bool:
        """Whether a prompt passes through every layer in chunks, on a CPU."""
        if self.model.device.type != "cpu" or not hasattr(self.model, "hetero_kv_injection"):
            return False
        cached = self.model.hetero_kv_injection.cache_layers()
        layers = sum(not isinstance(each, StateBeside) for each in cached)
        return sum(isinstance(module, ChunkedDecoderLayer) for module in self.model.modules()) == layers

    @cached_property
    def most_beside(self) -> int:
        """The most tokens of prompts in a forward with decoded tokens: with more, separate forwards take less time."""
        layers = [module for module in self.model.modules() if isinstance(module, ChunkedDecoderLayer)]
        return SMALL_BY_TILES if layers and all(each.multiplies_by_tiles for each in layers) else SMALL

    @property
    def why_no_drafts(self) -> str | None:
        """Why drafted tokens cannot be verified in one forward; None if they can."""
        if not hasattr(self.model, "hetero_kv_injection"):
            return "the model has no rules, and transformers' caches cannot drop tokens"
        if self._one_by_one is not None:
            return f"{self._one_by_one} decodes one token at a time under these rules, and cannot drop one"
        if self._by_prompt is not None:
            return f"{self._by_prompt} computes tokens of a prompt otherwise than decoded ones under these rules"
        if not self.mixes:
            return (
                "outside of attention the model does not compute each token alone on a CPU: it is on a GPU, has hooks "
                "of others or layers without an operator, or rotates by the longest row"
            )
        return None

    @property
    def why_no_sparse_drafts(self) -> str | None:
        """Why the model cannot guess by attention to few blocks; None if it can."""
        if self.why_no_drafts is not None:
            return self.why_no_drafts
        unfit = (f"{each.path} ({type(each).__name__})" for each in _operators(self.model) if not each.drafts_sparsely)
        if (found := next(unfit, None)) is not None:
            return f"{found} cannot attend to a few blocks for a guess; retrieval and full attention can (lookup works)"
        return None

    @property
    def may_choose(self) -> bool:
        """Whether a forward may choose the likeliest token itself (`likeliest`): the model is on a GPU."""
        return self.model.device.type == "cuda"

    @property
    def is_hooked(self) -> bool:
        """Whether foreign hooks are in the model. They may depend on all tokens of a forward."""
        return has_global_hooks() or any(has_own_hooks(module) for module in self.model.modules())

    def new_cache(self, store: Store) -> HeteroCache:
        """An empty cache of one row in a store that the model's caches share."""
        return HeteroCache(self.model, store=store, tokenizer=self._tokenizer)

    def prompt(self, cache: Cache, tokens: Sequence[int], question: int | None = None) -> torch.Tensor:
        """Compute a whole prompt after the tokens of a cache of one row. Returns the logits [vocab] of its last token.

        Args:
            question: how many of its last tokens are a question about the others (`HeteroCache.asking`); None if
                unknown.
        """
        if not isinstance(cache, HeteroCache):
            return self._logits(cache, torch.tensor([list(tokens)]))[0]
        return self.prefill(cache, Part(tokens, 0, len(tokens), 0, question))

    def prefill(self, cache: HeteroCache, part: Part) -> torch.Tensor:
        """Compute a part of a prompt. Returns the logits [vocab] of its last token.

        Methods observe the prompt from its first part on, and derive data from the whole prompt at its last part.
        """
        own = part.start - part.cached, part.stop - part.cached, len(part.prompt) - part.cached
        is_whole = part.is_first and part.is_last and own[1] > 1
        with cache.asking(part.question), nullcontext() if is_whole else cache.prompt_part(*own):
            return self._logits(cache, torch.tensor([part.tokens]))[0]

    def mixed(
        self, caches: Sequence[HeteroCache], tokens: Sequence[int], prompts: Sequence[tuple[HeteroCache, Part]]
    ) -> torch.Tensor:
        """`decode`, and `prefill` of several prompts, in one forward, which reads the weights once.

        There may be no cache to decode: a small part of a prompt takes less time so than by `prefill`. Returns logits
        [rows + prompts, vocab]. After an exception, no cache has changed.
        """
        new = [
            PromptTokens(cache, len(part.tokens), PromptPart(part.is_first, part.is_last, part.question, is_mixed=True))
            for cache, part in prompts
        ]
        own = [token for _, part in prompts for token in part.tokens]
        with joined(caches, new) as cache:
            return self._logits(cache, torch.tensor([*tokens, *own])[:, None])

    def decode(self, caches: Sequence[Cache], tokens: Sequence[int]) -> torch.Tensor:
        """Decode one token of each cache of one row. Returns logits [rows, vocab].

        Each row is computed as if it were alone; row by row if the longest row would change the others' rotation. After
        an exception in a joint forward, no cache has changed.
        """
        token_ids = torch.tensor(tokens)[:, None]
        if len(caches) == 1:
            return self._logits(caches[0], token_ids)
        if self.longest_rotates_all:
            return torch.cat([self._logits(cache, ids[None]) for cache, ids in zip(caches, token_ids, strict=True)])
        with joined(caches) as cache:
            return self._logits(cache, token_ids)

    def likeliest(self, caches: Sequence[Cache], tokens: Sequence[int]) -> Sequence[torch.Tensor | Likeliest]:
        """As `decode`, for samplers that all `take_likeliest`: the likeliest tokens if the GPU chose them."""
        first = caches[0]
        if not isinstance(first, HeteroCache) or (len(caches) > 1 and self.longest_rotates_all):
            return list(self.decode(caches, tokens))
        request = LikeliestRequest()
        with (
            nullcontext(first) if len(caches) == 1 else joined(caches) as cache,
            cache.requesting(likeliest=request),
        ):
            output = self._called(cache, torch.tensor(tokens)[:, None], **self._last_logits)
        return list(output.logits[:, -1]) if request.rows is None else request.rows

    def verify(
        self, caches: Sequence[HeteroCache], tokens: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[DraftedTokens]]:
        """Compute several tokens of each cache of one row, in one forward.

        Each token is computed as by `decode`, after the ones before it. Requires that `why_no_drafts` is None.

        Args:
            tokens: for each cache its next token, then drafted ones.

        Returns for each cache the logits [its tokens, vocab], and the tokens that it stored, of which the caller keeps
        the accepted ones. After an exception, no cache has changed.
        """
        counts = [len(each) for each in tokens]
        with joined(caches, tokens=counts) as cache:
            logits = self._logits(cache, torch.tensor([token for each in tokens for token in each])[:, None])
        steps = () if cache.request.rows is None else cache.request.rows.steps
        stored = [DraftedTokens(each, [step for step in steps if step.group is each.groups[0]]) for each in caches]
        return list(logits.split(counts)), stored

    def guess(self, caches: Sequence[HeteroCache], tokens: Sequence[int], few: Sequence[DraftBlocks]) -> torch.Tensor:
        """As `decode`, by attention to few blocks, for guesses at the tokens that follow. Returns logits [rows, vocab].

        Requires that `why_no_sparse_drafts` is None, and a context of `guessing`.
        """
        with joined(caches, draft_blocks=few) as cache:
            return self._logits(cache, torch.tensor(tokens)[:, None])

    @contextmanager
    def guessing(self, caches: Sequence[HeteroCache]) -> Iterator[None]:
        """At the end of this context, the caches drop what was stored in it (`guess`)."""
        with ExitStack() as points:
            for cache in caches:
                points.callback(run_to_completion, rollback_point(cache))
            yield

    def every(self, cache: Cache, tokens: Sequence[int]) -> torch.Tensor:
        """Compute tokens after those of a cache of one row. Returns the logits after each, [tokens, vocab]."""
        return self._every(cache, torch.tensor([list(tokens)]))[0]

    def _logits(self, cache: Cache, token_ids: torch.Tensor) -> torch.Tensor:
        return self._every(cache, token_ids, **self._last_logits)[:, -1]

    def _every(self, cache: Cache, token_ids: torch.Tensor, **last: Any) -> torch.Tensor:
        """The logits [rows, tokens, vocab] of a forward; with `last` only those of the last token."""
        logits: torch.Tensor = self._called(cache, token_ids, **last).logits
        return logits

    @torch.no_grad()
    def _called(self, cache: Cache, token_ids: torch.Tensor, **last: Any) -> Any:
        """The output of a forward."""
        device, positions = self.model.device, {}
        if self._takes_positions and not isinstance(cache, HeteroCache):
            # Some untouched models number the tokens of each forward from 0.
            stored = cache.get_seq_length()
            positions["position_ids"] = torch.arange(stored, stored + token_ids.shape[1], device=device)[None]
        ids = on_device(token_ids, device)
        return self.model(input_ids=ids, use_cache=True, **{self._cache_name: cache}, **positions, **last)


def _operators(model: Any) -> list[AttentionOperator]:
    return [module for module in model.modules() if isinstance(module, AttentionOperator)]


def _is_exact(operator: AttentionOperator) -> bool:
    return operator.prefills_exactly and operator.continues_exactly and not operator.changes_arguments


def _mixes(model: Any) -> bool:
    """Whether everything outside of attention is computed token by token, on a CPU (or will be, without weights)."""
    layers, operators = model.hetero_kv_injection.cache_layers(), _operators(model)
    return (
        model.device.type in ("cpu", "meta")
        and len(operators) == len(layers)
        and all(map(_is_exact, operators))
        and all(isinstance(each, FamilyLayer) and not each.is_strided and not each.waits_for_others for each in layers)
        and sum(isinstance(module, ChunkedDecoderLayer) for module in model.modules()) == len(layers)
    )
