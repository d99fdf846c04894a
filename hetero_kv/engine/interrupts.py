"""Work that must not be left half-done."""

from __future__ import annotations

from collections.abc import Callable


def run_to_completion(act: Callable[[], None]) -> None:
    """Call `act`, which must be repeatable from any intermediate state, until it has run to completion.

    After Ctrl-C in `act`, it is called again from its beginning, and then the interrupt is raised. After any other
    exception it is called once more.
    """
    try:
        act()
    except KeyboardInterrupt:
        run_to_completion(act)
        raise
    except Exception:
        act()
