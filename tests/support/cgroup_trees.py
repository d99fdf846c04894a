"""Fake /proc folders and control groups."""

from __future__ import annotations

from pathlib import Path


class ControlGroups:
    """A fake /proc/self, `process`, and mounted control groups below `mount`."""

    def __init__(self, folder: Path) -> None:
        self.mount, self.process = folder / "cgroup", folder / "proc"
        self.process.mkdir()

    def write(self, group: str, **files: object) -> None:
        """Fill a group: `write(group, memory__max=5)` is its file memory.max."""
        folder = self.mount / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")

    def mounted(self, memberships: str, filesystem: str, options: str, root: str = "/") -> None:
        """Let the process be in groups, by the lines of /proc/self/cgroup, of a file system that is mounted."""
        (self.process / "cgroup").write_text(memberships)
        line = f"35 31 0:32 {root} {self.mount} rw,relatime - {filesystem} {filesystem} {options}\n"
        (self.process / "mountinfo").write_text(f"1 0 0:1 / / rw - ext4 /dev/root rw\n{line}")
