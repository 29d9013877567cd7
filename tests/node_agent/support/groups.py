"""A /proc and the files of its control groups, as a kernel shows them, in a folder."""

from collections.abc import Mapping
from pathlib import Path

V1_MOUNTS = """31 23 0:28 / {fs} rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / {fs}/memory rw,relatime - cgroup cgroup rw,memory
32 31 0:29 / {fs}/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:38 / {fs}/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "30 23 0:26 / {fs} rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def machine(root: Path, mounts: str, cgroup: str, files: Mapping[str, str], pid: str = "42") -> Path:
    """A /proc of one process, and the files that its kernel shows; `fs` in `mounts` is where they are mounted."""
    proc, fs = root / "proc", root / "fs"
    for folder in (proc / "self", proc / pid, fs):
        folder.mkdir(parents=True, exist_ok=True)
    (proc / "self" / "mountinfo").write_text(mounts.format(fs=fs))
    (proc / pid / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return proc
