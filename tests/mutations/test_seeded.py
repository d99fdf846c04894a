"""Mutations can still be made: what they change stands where they say, and their tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutations.gpu_defects import DEFECTS
from tests.mutations.lasting import LASTING
from tests.mutations.prompts import PROMPTS
from tests.mutations.ragged_rows import RAGGED_ROWS
from tests.mutations.refused import REFUSED
from tests.mutations.run_files import RUNS
from tests.mutations.seeded import MUTATIONS
from tests.mutations.single_tokens import SINGLE_TOKENS

PROJECT = Path(__file__).parents[2]


ALL = (*MUTATIONS, *REFUSED, *RUNS, *LASTING, *PROMPTS, *DEFECTS, *RAGGED_ROWS, *SINGLE_TOKENS)


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.meaning)
def test_a_mutations_text_occurs_once_in_its_file(mutation):
    text = (PROJECT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    # A mutated file must be Python, or any test would fail.
    ast.parse(text.replace(mutation.old, mutation.new))
    assert mutation.new != mutation.old


def test_the_tests_of_mutations_are_there():
    for test in {test for mutation in ALL for test in mutation.tests}:
        file, _, function = test.partition("::")
        name = re.sub(r"\[.*", "", function)
        assert not name or f"def {name}(" in (PROJECT / file).read_text()
