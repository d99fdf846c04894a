"""Make each mistake that the files beside this one list, in a copy of the project, and say whether its tests saw it.

The tests of `make test`, without the slow ones.

Ends with 0 where every mistake was seen, with 1 where one was not, and with 2 where the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutations.gpu_defects import DEFECTS
from tests.mutations.lasting import LASTING
from tests.mutations.prompts import PROMPTS
from tests.mutations.ragged_rows import RAGGED_ROWS
from tests.mutations.refused import REFUSED
from tests.mutations.run_files import RUNS
from tests.mutations.seeded import MUTATIONS, Mutation
from tests.mutations.single_tokens import SINGLE_TOKENS

PROJECT = Path(__file__).parents[2]
#: Seconds that the tests of a mutation have.
LONGEST = 900
#: Bytes of memory that they may take.
MOST_MEMORY = 4 << 30
# Compiled kernels are good for as long as their files are the same.
_COMPILED = ("*.nbi", "*.nbc")


def copied(target: Path) -> None:
    """The project's files, and what its kernels were compiled to."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=PROJECT, check=True, capture_output=True, text=True).stdout.split("\0")
    compiled = [path.relative_to(PROJECT) for kind in _COMPILED for path in (PROJECT / "cpu_ops").rglob(kind)]
    for name in (*filter(None, names), *compiled):
        source = PROJECT / name
        if source.is_file() or source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            # With its time, by which compiled kernels know it; a link as a link, so that a mutation is seen through it.
            shutil.copy2(source, target / name, follow_symlinks=False)


def _limit_memory() -> None:
    # Not the address space, of which CUDA reserves more than any machine has.
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))


def first_failure(project: Path, tests: tuple[str, ...]) -> str | None:
    """The test that fails first; None where all pass. Raises RuntimeError where pytest cannot run them."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            preexec_fn=_limit_memory,
        )
    except subprocess.TimeoutExpired:
        return f"none ended within {LONGEST} s"
    if done.returncode < 0:
        return f"none ended: signal {-done.returncode} came first"
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode} for {' '.join(tests)}:\n{done.stdout[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", done.stdout, re.MULTILINE)
    return None if done.returncode == 0 else failed[1] if failed else "a test that pytest does not name"


def killer(project: Path, mutation: Mutation) -> str | None:
    """The test that fails where this mutation is made in `project`, which is then as it was; None where none does."""
    file = project / mutation.file
    text, times = file.read_text(), file.stat()
    if text.count(mutation.old) != 1:
        raise RuntimeError(f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not once")
    try:
        file.write_text(text.replace(mutation.old, mutation.new))
        return first_failure(project, mutation.tests)
    finally:
        file.write_text(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def chosen(words: list[str]) -> list[Mutation]:
    """The mutations with one of these words, or sequences of them, in what they mean; all where there are none."""
    return [
        mutation
        for mutation in (*MUTATIONS, *REFUSED, *RUNS, *LASTING, *PROMPTS, *DEFECTS, *RAGGED_ROWS, *SINGLE_TOKENS)
        if not words or any(each in mutation.meaning for each in words)
    ]


def survivors(mutations: list[Mutation]) -> list[Mutation]:
    """Those that no test sees; prints a row of the table for each mutation. Raises RuntimeError as `first_failure`."""
    survived = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        project = Path(folder)
        copied(project)
        if failed := first_failure(project, tuple(sorted({test for each in mutations for test in each.tests}))):
            raise RuntimeError(f"{failed} fails without any mutation; mend that first")
        print("| mutation | file | result | test that fails first | s |\n|---|---|---|---|---|", flush=True)
        for mutation in mutations:
            start = time.perf_counter()
            seen_by = killer(project, mutation)
            if seen_by is None:
                survived.append(mutation)
            cells = mutation.meaning, f"`{mutation.file}`", "killed" if seen_by else "SURVIVED", seen_by or ""
            print(f"| {' | '.join(cells)} | {time.perf_counter() - start:.0f} |", flush=True)
    print(f"\n{len(mutations) - len(survived)} of {len(mutations)} killed")
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--list", action="store_true", help="say which there are, and make none")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="words of what a mutation means; may be repeated"
    )
    arguments = parser.parse_args()
    mutations = chosen(arguments.only)
    if not mutations:
        parser.error(f"no mutation is called {' or '.join(arguments.only)}; --list says which there are")
    if arguments.list:
        print("\n".join(f"{mutation.meaning} ({mutation.file})" for mutation in mutations))
        return 0
    try:
        return 1 if survivors(mutations) else 0
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
