"""Control groups of processes on Linux: the folder of a process's group, of version 1 or 2 of the hierarchies."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainctl.protocol.machine.shim import boot_id

PROC = Path("/proc")


@dataclass(frozen=True)
class Group:
    """A process's control group in one hierarchy."""

    version: int  # 1 or 2
    mount: Path  # where the hierarchy is mounted
    folder: Path  # the group's files; at `mount` or below it

    @property
    def and_above(self) -> list[Path]:
        """Return the group's folder and those of the groups that contain it, as far as the mount shows them."""
        above = [path for path in self.folder.parents if path.is_relative_to(self.mount)]
        return [self.folder, *above]


def groups(pid: int | str, controller: str, proc: Path = PROC) -> list[Group]:
    """A process's groups that may account for a controller, such as `memory`. Version 1 comes first: where both are
    mounted, it has the controller. Empty elsewhere than on Linux."""
    paths = _paths(proc / str(pid) / "cgroup", controller)
    return [
        Group(version, mount, mount / _below(paths[version], root))
        for version, root, mount in _mounts(proc / "self" / "mountinfo", controller)
        if version in paths
    ]


def cpu_quota(pid: int | str = "self", proc: Path = PROC) -> float | None:
    """Cores that a process's groups let it use, with all that is in them: the tightest limit; None without one."""
    tightest = _tightest(pid, proc)
    return None if tightest is None else tightest[0]


def _tightest(pid: int | str, proc: Path) -> tuple[float, Path] | None:
    """The tightest quota and the folder of the group that has it, of several the outermost; None without one."""
    folders = (folder for group in groups(pid, "cpu", proc) for folder in reversed(group.and_above))
    quotas = ((quota, folder) for folder in folders if (quota := _quota(folder)) is not None)
    return min(quotas, key=lambda pair: pair[0], default=None)


def core_pool(pid: int | str = "self", proc: Path = PROC) -> str:
    """Return what identifies the processors that a process may use: equal for processes of one machine that have the
    same affinity and the same limiting group; empty if the machine isn't known."""
    boot, tightest = boot_id(), _tightest(pid, proc)
    if not boot:
        return ""
    numbers = sorted(os.sched_getaffinity(0 if pid == "self" else int(pid))) if hasattr(os, "sched_getaffinity") else []
    words = [boot, ",".join(map(str, numbers))]
    if tightest is not None:  # every container may see its own group as /, but no two have the same inode
        words.append(str(tightest[1].stat().st_ino))
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def usable_cores() -> float:
    """Processors that this process and those it starts may use: by its affinity and by its groups' quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(found), cpu_quota() or float(found))


def _quota(folder: Path) -> float | None:
    """Return the quota in processors. Of version 2, `cpu.max` has `max` or microseconds, and the period's; of version 1
    each has a file."""
    names = ("cpu.max",) if (folder / "cpu.max").exists() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = [word for name in names for word in " ".join(lines_of(folder / name)).split()]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


def lines_of(file: Path) -> list[str]:
    """A file's lines; none of a file that can't be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _paths(file: Path, controller: str) -> dict[int, str]:
    """A process's path in the hierarchies that may account for a controller, by their version."""
    found = dict[int, str]()
    for line in lines_of(file):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            found[1] = path
        elif number == "0" and not controllers:
            found[2] = path
    return found


def _mounts(file: Path, controller: str) -> list[tuple[int, str, Path]]:
    """(version, root, mount point) of the mounted hierarchies that may account for a controller, version 1 first."""
    found = list[tuple[int, str, Path]]()
    for line in lines_of(file):
        fields, _, rest = line.partition(" - ")
        kind = rest.split()
        where = fields.split()
        if len(kind) < 3 or len(where) < 5:
            continue
        if kind[0] == "cgroup2":
            found.append((2, where[3], Path(where[4])))
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            found.append((1, where[3], Path(where[4])))
    return sorted(found)


def _below(path: str, root: str) -> PurePosixPath:
    """A group's path as it is below a mount whose root it may lie in; a container mounts just its own part."""
    whole = PurePosixPath(path)
    return whole.relative_to(root) if whole.is_relative_to(root) else PurePosixPath(path.lstrip("/"))
