"""What must not be left half-done."""

from __future__ import annotations

from collections.abc import Callable


def completed(act: Callable[[], None]) -> None:
    """Call `act`, which comes to the same end however far it had come before.

    Where Ctrl-C comes in the middle of it, it is called again from its beginning, and the interrupt raised then; where
    something else is raised, it is called once more.
    """
    try:
        act()
    except KeyboardInterrupt:
        completed(act)
        raise
    except Exception:
        act()
