"""Former names: a setting's still works, and the log names today's once per process; a method's is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping

_logger = logging.getLogger(__name__)
#: The former names that were told in this process, each with today's.
_told: set[tuple[str, str]] = set()


def tell(former: str, name: str, place: str) -> None:
    """Warn, once per process, that the setting `former` is called `name` today; `place` is where it was found."""
    if (former, name) not in _told:
        _told.add((former, name))
        _logger.warning("%s: the setting %s is called %s now; the former name still works", place, former, name)


def refuse_former_methods(cls: type, former: Mapping[str, str]) -> None:
    """Raise TypeError if `cls` itself defines a name that was renamed in its base class, and so would never be used.

    Args:
        former: former name -> today's.
    """
    for name, today in former.items():
        if name in cls.__dict__:
            raise TypeError(f"{cls.__qualname__}.{name} is called {today} now, and would not be used; rename it")
