"""How much of a prompt was computed before, and why no more of it could be reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "all", "extends", "differs", "nothing_alike", "nothing_kept", "chooses", "cannot_go_back", "other_weights",
    "not_loaded", "store_away", "not_exact", "off",
]  # fmt: skip


@dataclass(frozen=True)
class Reuse:
    """What a request reused from sequences that were computed before.

    Attributes:
        tokens: how many of the prompt's first tokens were not computed again.
        reason: why the others were computed: "all" but the last token, whose logits are needed, were reused; the prompt
            "extends" the longest known sequence; it "differs" from all known ones from token `tokens` on; no known
            sequence shares a prefix ("nothing_alike"), or none is kept ("nothing_kept"); the attention of the prompt's
            last tokens "chooses" what its answer attends to; layers of `kind`
            "cannot_go_back" to where the prompt diverges; the sequence was computed under "other_weights", adapters or
            hooks; a stored context was "not_loaded", for lack of memory or disk, or because it is damaged; the address
            of stored contexts did not answer in time ("store_away"); a prompt that reuses a prefix is "not_exact" under
            the rules; the request turned reuse "off".
        common: the length of the longest prefix that the prompt shares with a known sequence; `tokens` of it could be
            reused.
        source: where the tokens were: "memory", "disk", or None if none were reused.
        kind: the kinds of layers that cannot roll back.
    """

    tokens: int = 0
    reason: Reason = "nothing_kept"
    common: int = 0
    source: Literal["memory", "disk"] | None = None
    kind: str = ""

    @property
    def text(self) -> str:
        """The reason as a sentence."""
        return {
            "all": f"all but the last of the prompt's {self.tokens + 1} tokens were computed before",
            "extends": f"the longest known sequence ends after token {self.tokens}",
            "differs": f"the prompt differs from every known sequence from token {self.tokens} on",
            "nothing_alike": "no known sequence begins as the prompt does",
            "nothing_kept": "no sequence is kept yet",
            "chooses": (
                f"the prompt's tokens from {self.tokens} on are computed, because under the rules their attention "
                "chooses what the answer attends to"
            ),
            "cannot_go_back": (
                f"the prompt diverges from a known sequence at token {self.common}, and layers of kind {self.kind} "
                f"cannot roll back to it: the last checkpoint before it is at token {self.tokens}"
            ),
            "other_weights": (
                f"the sequence that begins with the same {self.common} tokens was computed under other weights, "
                "adapters or hooks"
            ),
            "not_loaded": (
                f"a stored context begins with the same {self.common} tokens, and was not loaded: there was too little "
                "memory or disk, or it is damaged"
            ),
            "store_away": "the address of stored contexts did not answer in time",
            "not_exact": "under these rules a prompt that reuses a prefix is not computed as a whole one",
            "off": "the request turned reuse off",
        }[self.reason]
