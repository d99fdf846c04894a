"""Prompts of several lengths, and later turns."""

from __future__ import annotations

from tests.support.ragged_rows import prompt

LENGTHS = (3, 40, 129, 200)
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
TURNS = [prompt(length, 10 + seed) for seed, length in enumerate((21, 1, 9, 33, 4))]
