"""Checks commit subjects: `area: imperative subject`, at most 72 characters. `make lint` runs it.

Only commits after FIRST are checked. Outside a git checkout, and in a shallow clone without FIRST, there is nothing to
compare with, and the check says so.
"""

from __future__ import annotations

import re
import subprocess
import sys

#: The last commit before the rule.
FIRST = "43a468a"
LONGEST = 72
SUBJECT = re.compile(r"[a-z0-9][a-z0-9_./-]*: \S.*[^.\s]")


def problem(subject: str) -> str | None:
    """What is wrong with a commit subject, in words; None where it follows the rule."""
    if len(subject) > LONGEST:
        return f"it has {len(subject)} characters, at most {LONGEST} are allowed"
    if not SUBJECT.fullmatch(subject):
        return "write it as `area: imperative subject`, without a full stop"
    return None


def main() -> int:
    """Print every subject that breaks the rule; returns 1 if there is one."""
    log = subprocess.run(
        ["git", "log", "--no-merges", "--format=%h%x09%s", f"{FIRST}..HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    if log.returncode:
        print(f"commit subjects: not checked, git says: {log.stderr.strip().splitlines()[0]}")
        return 0
    found = [(line, reason) for line in log.stdout.splitlines() if (reason := problem(line.partition("\t")[2]))]
    for line, reason in found:
        print(f"{line}\n  {reason}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
