"""Whether decoded tokens are captured on a GPU, as a setting asks and as it turns out."""

from __future__ import annotations

from hetero_kv.errors import UnsupportedModelError

_OFF, _ON, _WAITING = "off", "on", "not yet"
# Times that it is tried to capture where memory runs out; tokens that run as they are behind the first, and how many
# times as many behind each other.
_TRIES, _RESTING, _LONGER = 4, 16, 4


class Captures:
    """Whether a model's tokens are to be captured, and what has come of it.

    Args:
        asked: the setting `cuda_graphs`.

    Attributes:
        state: None before any token could have been captured, then `on`, `off` with the reason, or `not yet`: memory
            ran out, and it is to be tried again.
    """

    def __init__(self, asked: str = "auto") -> None:
        self.asked = asked
        self.state: str | None = None
        self._tries = self._resting = 0

    @property
    def is_off(self) -> bool:
        """Whether nothing is captured, or cannot be."""
        return self.asked == _OFF or (self.state is not None and self.state.startswith(_OFF))

    def rests(self) -> bool:
        """Whether a token is one of those that are not tried to be captured, since memory has run out before them."""
        is_one = self._resting > 0
        self._resting -= is_one
        return is_one

    def succeed(self) -> None:
        """Note that a token has been captured."""
        self.state, self._tries = _ON, 0

    def run_out(self) -> None:
        """Note that memory ran out while a token was captured. Raises UnsupportedModelError where it must be captured,
        and memory has run out whenever it was tried."""
        self._tries += 1
        full = "the GPU has too little memory left for graphs, tried"
        if self._tries >= _TRIES:
            self.refuse(f"{full} {self._tries} times")
            return
        self._resting = _RESTING * _LONGER ** (self._tries - 1)
        self.state = f"{_WAITING}: {full} {self._tries} of {_TRIES} times"

    def refuse(self, reason: str) -> None:
        """Note why tokens are not captured. Raises UnsupportedModelError where they must be."""
        if self.asked == _ON:
            raise UnsupportedModelError(
                f"cuda_graphs is on, and a token cannot be captured: {reason}; set cuda_graphs to auto or off"
            )
        self.state = f"{_OFF}: {reason}"
