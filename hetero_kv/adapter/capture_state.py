"""Whether decoded tokens are captured as CUDA graphs: the setting, and the outcome so far."""

from __future__ import annotations

from hetero_kv.errors import UnsupportedModelError

_OFF, _ON, _WAITING = "off", "on", "not yet"
# Number of capture attempts when memory runs out; number of uncaptured tokens after the first failed attempt, and its
# growth factor for each further one.
_TRIES, _RESTING, _LONGER = 4, 16, 4


class CaptureState:
    """Whether a model's tokens are to be captured, and the outcome.

    Args:
        setting: the setting `cuda_graphs`.

    Attributes:
        state: None before the first token that could be captured; then `on`, `off` with the reason, or `not yet`:
            memory ran out, and another attempt follows.
    """

    def __init__(self, setting: str = "auto") -> None:
        self.setting = setting
        self.state: str | None = None
        self._tries = self._resting = 0

    @property
    def is_off(self) -> bool:
        """Whether capturing is switched off or impossible."""
        return self.setting == _OFF or (self.state is not None and self.state.startswith(_OFF))

    def backs_off(self) -> bool:
        """Whether this token must run uncaptured, in the pause after memory ran out; counts the token."""
        is_one = self._resting > 0
        self._resting -= is_one
        return is_one

    def succeed(self) -> None:
        """Record a successful capture."""
        self.state, self._tries = _ON, 0

    def run_out(self) -> None:
        """Record that memory ran out during a capture.

        Raises UnsupportedModelError when captures are required and all attempts have run out of memory.
        """
        self._tries += 1
        full = "the GPU has too little free memory for graphs, tried"
        if self._tries >= _TRIES:
            self.refuse(f"{full} {self._tries} times")
            return
        self._resting = _RESTING * _LONGER ** (self._tries - 1)
        self.state = f"{_WAITING}: {full} {self._tries} of {_TRIES} times"

    def refuse(self, reason: str) -> None:
        """Record why tokens are not captured. Raises UnsupportedModelError when captures are required."""
        if self.setting == _ON:
            raise UnsupportedModelError(
                f"cuda_graphs is on, but a token cannot be captured: {reason}; set cuda_graphs to auto or off"
            )
        self.state = f"{_OFF}: {reason}"
