"""A burst: the tokens that one forward adds to a sequence; a draft guessed all but the last."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_kv.engine.drafted_tokens import DraftedTokens
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.serving.sampler import Choice, Sampler


class Burst:
    """Chooses tokens by a forward's logits for as long as the draft guessed each of them.

    Every token is chosen exactly as without a draft, with the random number, penalties and mask of its position. A
    guess is accepted only if it is the chosen token. The answer's distribution is therefore that of the model: for a
    guess that is one token, this is rejection sampling (Leviathan et al. 2023, arXiv:2211.17192).

    Args:
        logits: [1 + guesses, vocab], after the newest token and after each guess; or only the likeliest token, for a
            sampler that takes it.
        draft: the guesses.
        stored: what the forward stored; None for a single token.
    """

    def __init__(
        self, logits: torch.Tensor | Sequence[torch.Tensor | Likeliest], draft: Sequence[int] = (),
        stored: DraftedTokens | None = None,
    ) -> None:  # fmt: skip
        self._logits, self._draft, self._stored = logits, draft, stored
        self._chosen = 0
        # A choice that was not returned yet, because of an interrupt.
        self._pending: Choice | None = None
        #: Whether this forward gives no further token.
        self.is_over = False

    @property
    def drafted(self) -> int:
        """The number of guesses."""
        return len(self._draft)

    @property
    def accepted(self) -> int:
        """How many guesses are tokens of the answer."""
        return max(0, self._chosen - 1)

    def choose(self, sampler: Sampler) -> Choice:
        """The next token. The burst ends when the draft did not guess it; wrong guesses are then dropped.

        Raises LogitsError as the sampler; the burst is unchanged then.
        """
        if self._pending is None:
            self._pending = sampler.choose(self._logits[self._chosen])
            self._chosen += 1
        choice = self._pending
        if self._chosen > len(self._draft) or choice.token != self._draft[self._chosen - 1]:
            self.end()
        self._pending = None
        return choice

    def end(self) -> None:
        """Drop the tokens that follow the chosen ones from the cache; the newest chosen token is not stored.

        After an interrupt it can be called again.
        """
        if self._stored is not None:
            self._stored.keep(max(1, self._chosen))
            self._stored = None
        self.is_over = True
