"""Campaigns: thousands of damaged inputs and interrupted writes, seeded, and what became of each.

The suite makes a few of each (`test_campaigns.py`); `make campaign` makes a hundred times as many and prints a table.
A module of this package that has `CAMPAIGNS`, a tuple of `Campaign`, takes part.
"""

import sys
from pathlib import Path

# Helpers of the tests, which pytest finds beside the tests that it collects.
_TESTS = Path(__file__).parents[1]
sys.path += [str(folder) for folder in (_TESTS, _TESTS / "models") if str(folder) not in sys.path]
