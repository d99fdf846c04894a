"""Conversations whose rows have different lengths, in one batch and alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetero_kv import HeteroCache

#: What sums in another order may differ by, as a share of the largest logit. Rows of equal length that share a batch
#: differ by up to 4e-6 from what they are alone, and one block of eight tokens chosen otherwise by more than 1e-2.
ROUNDING = 1e-4
#: A part of a script that stands for as many tokens as this, each the most likely one behind those before.
Greedy = int
Script = Sequence[torch.Tensor | Greedy]


def prompt(count: int, seed: int) -> torch.Tensor:
    """Random token ids [count]."""
    return torch.randint(2, 97, (count,), generator=torch.Generator().manual_seed(seed))


def padded(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' tokens, padded on the left with a token like any other, and their mask: [rows, columns] each."""
    width = max(map(len, parts))
    token_ids = torch.full((len(parts), width), 5)
    mask = torch.zeros_like(token_ids)
    for row, part in enumerate(parts):
        token_ids[row, width - len(part) :] = part
        mask[row, width - len(part) :] = 1
    return token_ids, mask


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token behind the last of `logits` [tokens, vocab], as [1].

    Of those that are as likely but for rounding the first, so that two conversations go on alike.
    """
    last = logits[-1:]
    return (last >= last.max() - ROUNDING * last.abs().max()).int().argmax(dim=-1)


@torch.no_grad()
def together(
    model: Any, cache: HeteroCache, parts: Sequence[torch.Tensor], with_mask: bool = True
) -> list[torch.Tensor]:
    """Logits [tokens, vocab] of each row's part, from one forward of them all; a mask covers what came before too."""
    token_ids, mask = padded(parts)
    kwargs = {}
    if with_mask:
        past = [cache.attention_mask] if cache.get_seq_length() else []
        kwargs["attention_mask"] = torch.cat([*past, mask], dim=1).to(model.device)
    logits = model(token_ids.to(model.device), past_key_values=cache, **kwargs).logits.cpu()
    return [row[-len(part) :] for row, part in zip(logits, parts, strict=True)]


@torch.no_grad()
def alone(model: Any, cache: HeteroCache, script: Script) -> torch.Tensor:
    """Logits [tokens, vocab] of one conversation alone in a cache, its forwards without any mask."""
    logits: list[torch.Tensor] = []
    for part in script:
        for _ in range(part if isinstance(part, int) else 1):
            tokens = likeliest(logits[-1]) if isinstance(part, int) else part
            logits.append(model(tokens[None].to(model.device), past_key_values=cache).logits[0].cpu())
    return torch.cat(logits)


class Batch:
    """Rows that go on together in one cache, and what each of them has been told.

    Attributes:
        cache: theirs.
        logits: of each row, those of all its tokens so far.
    """

    def __init__(self, model: Any, cache: HeteroCache, prompts: Sequence[torch.Tensor]) -> None:
        self.model, self.cache = model, cache
        self.logits = together(model, cache, prompts)

    def say(self, parts: Sequence[torch.Tensor], with_mask: bool = True) -> None:
        """One part more for each row."""
        told = together(self.model, self.cache, parts, with_mask)
        self.logits = [torch.cat(pair) for pair in zip(self.logits, told, strict=True)]

    def answer(self, tokens: Greedy) -> None:
        """As many tokens more for each row, the most likely ones, with a mask for every other step."""
        for step in range(tokens):
            self.say([likeliest(logits) for logits in self.logits], with_mask=step % 2 == 1)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        self.cache.select(rows)
        self.logits = [self.logits[row] for row in rows]

    def extend(self, other: Batch) -> None:
        """Go on with the rows of another batch too."""
        self.cache.extend(other.cache)
        self.logits += other.logits


def assert_same_but_for_rounding(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """The most likely tokens of two conversations, and their logits, are the same."""
    assert actual.shape == expected.shape, what
    error = (actual - expected).abs().amax(dim=-1) / expected.abs().max()
    assert error.max() < ROUNDING, f"{what}: logits of token {int((error >= ROUNDING).int().argmax())} differ first"
    # Where two tokens are as likely as each other but for rounding, either is right.
    first, second = expected.topk(2, dim=-1).values.unbind(dim=-1)
    clear = first - second > ROUNDING * expected.abs().max()
    assert actual.argmax(dim=-1)[clear].equal(expected.argmax(dim=-1)[clear]), what
