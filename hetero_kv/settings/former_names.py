"""Former names of settings: they still work, and the log names today's once per process."""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)
#: The former names that were told in this process, each with today's.
_told: set[tuple[str, str]] = set()


def tell(former: str, name: str, place: str) -> None:
    """Warn, once per process, that the setting `former` is called `name` today; `place` is where it was found."""
    if (former, name) not in _told:
        _told.add((former, name))
        _logger.warning("%s: the setting %s is called %s now; the former name still works", place, former, name)
