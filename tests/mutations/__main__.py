"""Make each mistake in a copy of the project, run its tests there: `python -m tests.mutations [words of a meaning]`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutations.seeded import MUTATIONS, Mutation

PROJECT = Path(__file__).parents[2]
# Compiled kernels are good for as long as their files are the same.
_COMPILED = ("*.nbi", "*.nbc")


def copied(target: Path) -> None:
    """The project's files, and what its kernels were compiled to."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=PROJECT, check=True, capture_output=True, text=True).stdout.split("\0")
    compiled = [path.relative_to(PROJECT) for kind in _COMPILED for path in (PROJECT / "cpu_ops").rglob(kind)]
    for name in (*filter(None, names), *compiled):
        source = PROJECT / name
        if source.is_file() and not source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            # With its time, by which compiled kernels know it.
            shutil.copy2(source, target / name)


def passes(project: Path, tests: tuple[str, ...]) -> bool:
    """Whether these tests pass. Raises RuntimeError where there are none, or pytest cannot run."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode} for {' '.join(tests)}:\n{done.stdout[-2000:]}")
    return done.returncode == 0


def is_killed(project: Path, mutation: Mutation) -> bool:
    """Whether a test of this mutation fails in `project`, which is then as it was."""
    file = project / mutation.file
    text, times = file.read_text(), file.stat()
    if text.count(mutation.old) != 1:
        raise RuntimeError(f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not once")
    try:
        file.write_text(text.replace(mutation.old, mutation.new))
        return not passes(project, mutation.tests)
    finally:
        file.write_text(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def main(words: str) -> int:
    """Print a line per mutation; returns how many survived."""
    chosen = [mutation for mutation in MUTATIONS if words in mutation.meaning]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        project = Path(folder)
        copied(project)
        tests = tuple(sorted({test for mutation in chosen for test in mutation.tests}))
        if not passes(project, tests):
            raise RuntimeError("the tests fail without any mutation; mend that first")
        print("| mutation | file | result | s |\n|---|---|---|---|", flush=True)
        for mutation in chosen:
            start = time.perf_counter()
            killed = is_killed(project, mutation)
            survived += not killed
            result = "killed" if killed else "SURVIVED"
            print(
                f"| {mutation.meaning} | `{mutation.file}` | {result} | {time.perf_counter() - start:.0f} |", flush=True
            )
    print(f"\n{len(chosen) - survived} of {len(chosen)} killed")
    return survived


if __name__ == "__main__":
    sys.exit(min(1, main(" ".join(sys.argv[1:]))))
