"""Linux control groups (version 1 and 2) of this process, by which containers bound memory and CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: The kernel's description of the process that reads it.
THIS_PROCESS = Path("/proc/self")


class Group(NamedTuple):
    """A control group that acts on a process: its `folder`, and its `version` (1 or 2), which fixes the file names."""

    folder: Path
    version: int

    def text(self, name: str) -> str | None:
        """The content of a file of the group, stripped; None if it cannot be read."""
        try:
            return (self.folder / name).read_text().strip()
        except OSError:  # the root group has no limits, and a container may not see the groups around it
            return None

    def number(self, name: str) -> int | None:
        """The whole number in a file of the group; None if it contains something else."""
        try:
            return int(self.text(name) or "")
        except ValueError:
            return None


def control_groups(controller: str, process: Path = THIS_PROCESS) -> Iterator[Group]:
    """The groups in which a controller acts on a process, and their ancestors, which bound it too.

    Args:
        controller: `memory` or `cpu`.
        process: the process's folder in /proc.
    """
    try:
        memberships = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            version, mounted = 2, _mounted(mounts, "cgroup2", None)
        elif controller in controllers.split(","):
            version, mounted = 1, _mounted(mounts, "cgroup", controller)
        else:
            continue
        for root, mount_point in mounted:
            inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            folder = mount_point / inside
            for group in (folder, *folder.parents):
                yield Group(group, version)
                if group == mount_point:
                    break


def _mounted(mounts: list[str], filesystem: str, option: str | None) -> Iterator[tuple[Path, Path]]:
    """(root within the file system, mount point) of the mounts, from the lines of /proc/self/mountinfo."""
    for line in mounts:
        place, _, kind = line.partition(" - ")
        fields, (name, _, options) = place.split(), kind.split(maxsplit=2)
        if name == filesystem and (option is None or option in options.split(",")):
            yield Path(fields[3]), Path(fields[4].replace("\\040", " "))
