"""Things that some tests need of the machine beside Python, and whether they are there."""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import psutil
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]


def find(program: str) -> str | None:
    """Return a program's path, also of an administrator's one such as sshd."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin")


def _has_namespaces() -> bool:
    """Return whether a network namespace can be made: it takes root and iproute2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"tc{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=HANG_SECONDS, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=HANG_SECONDS, check=False)
    return made.returncode == 0


def memory_groups() -> Path:
    """The folder of control groups that limit memory: of version 1 where it has its own, else of version 2."""
    root = Path("/sys/fs/cgroup")
    return root / "memory" if (root / "memory").is_dir() else root


def _has_cgroups() -> bool:
    """Return whether a control group can be made whose memory is limited: it takes root."""
    return _makes_group(memory_groups(), "memory.max", "memory.limit_in_bytes")


def _makes_group(folder: Path, *settings: str) -> bool:
    """Return whether a control group can be made that has one of these settings."""
    group = folder / f"tc{os.getpid()}-try"
    try:
        group.mkdir()
        found = any((group / name).exists() for name in settings)
        group.rmdir()
    except OSError:
        return False
    return found


def cpu_groups() -> Path:
    """The folder of control groups that limit processors."""
    root = Path("/sys/fs/cgroup")
    return root / "cpu" if (root / "cpu").is_dir() else root


def _has_cpu_quota() -> bool:
    """Return whether a control group can be made with a CPU quota: it takes root."""
    return _makes_group(cpu_groups(), "cpu.max", "cpu.cfs_quota_us")


def disk_groups() -> Path:
    """The folder of control groups that limit reads from disks."""
    root = Path("/sys/fs/cgroup")
    return root / "blkio" if (root / "blkio").is_dir() else root


def disk_of(folder: Path) -> str:
    """The number of the disk that holds a folder, such as 254:0; empty: none does."""
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return ""
    whole = device.resolve().parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()


def _has_disk_limit() -> bool:
    """Return whether a control group can be made that limits reads from the disk of temporary files: it takes root."""
    limits = _makes_group(disk_groups(), "io.max", "blkio.throttle.read_bps_device")
    return limits and bool(disk_of(Path(tempfile.gettempdir())))


def _has_nodejs() -> bool:
    """Node.js, and what its example needs: `make test` fetches it where there is npm."""
    return shutil.which("node") is not None and (ROOT / "examples" / "nodejs" / "node_modules" / "zeromq").is_dir()


def _has_device(backend: str, device: str) -> bool:
    """Return whether a rank can compute on a device, such as torch's "cuda" or MLX's "gpu"."""
    from trainctl.protocol.machine.devices import read_devices

    return any(one.backend == backend and one.device.startswith(device) for one in read_devices())


def _has_user_services() -> bool:
    """Return whether launchd or systemd runs services of this user."""
    if sys.platform == "darwin":
        return True
    if shutil.which("systemctl") is None:
        return False
    asked = ["systemctl", "--user", "is-system-running"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=HANG_SECONDS, check=False).stdout.strip()
    return bool(said) and said != "offline"


def _has_cuda_compiler() -> bool:
    """Return what torch.compile needs for an NVIDIA GPU, beside one."""
    from trainctl.protocol.machine.facts import lacking

    return not lacking("cuda")


def _has_compiler() -> bool:
    """Return what torch.compile needs on a CPU."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return shutil.which("g++") is not None and header.is_file()


def _has_chromium() -> bool:
    """Return whether it starts: a package that was installed in part lacks libraries."""
    if shutil.which("chromium") is None:
        return False
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["chromium", "--version"]
        return subprocess.run(words, capture_output=True, timeout=HANG_SECONDS, check=False).returncode == 0
    return False


def _has_loop_devices() -> bool:
    """Return whether a file can be a disk: it takes root and a free loop device."""
    if not _as_root("losetup", "mkfs.ext4", "mount", "umount"):
        return False
    return subprocess.run(["losetup", "--find"], capture_output=True, timeout=10, check=False).returncode == 0


def link_local_address() -> str:
    """This machine's first link-local IPv6 address, with its scope; empty: no interface has one."""
    entries = (entry for found in psutil.net_if_addrs().values() for entry in found)
    return next((entry.address for entry in entries if entry.address.startswith("fe80:")), "")


def _as_root(*programs: str) -> bool:
    return os.geteuid() == 0 and all(map(find, programs))


class Need(NamedTuple):
    """A thing that a mark `needs` names: whether it is there, and the programs that belong to it."""

    is_there: Callable[[], object]
    programs: tuple[str, ...] = ()


def _programs(*names: str) -> Need:
    return Need(lambda: all(map(find, names)), names)


NEEDS = {
    "linux": Need(lambda: sys.platform == "linux"),
    "root": Need(lambda: os.geteuid() == 0),
    "link-local": Need(link_local_address),
    "git": _programs("git"),
    "ps": _programs("ps"),
    "bash": _programs("bash"),
    "zsh": _programs("zsh"),
    "fish": _programs("fish"),
    "tmux": _programs("tmux"),
    "promtool": _programs("promtool"),
    "prometheus": _programs("prometheus"),
    "systemd-analyze": _programs("systemd-analyze"),
    "sshd": _programs("sshd", "ssh"),
    "rsync": _programs("rsync"),
    "loop-devices": Need(_has_loop_devices, ("mkfs.ext4",)),
    "namespaces": Need(_has_namespaces, ("ip",)),
    "nodejs": Need(_has_nodejs, ("node", "npm")),
    "cgroups": Need(_has_cgroups),
    "cpu-quota": Need(_has_cpu_quota),
    "cuda": Need(partial(_has_device, "torch", "cuda")),
    "cuda-compiler": Need(_has_cuda_compiler),
    "mlx-gpu": Need(partial(_has_device, "mlx", "gpu")),
    "mps": Need(partial(_has_device, "torch", "mps")),
    "user-services": Need(_has_user_services),
    "disk-limit": Need(_has_disk_limit),
    "real-model": Need(lambda: (ROOT / "build" / "real-model" / "model" / "model.safetensors").is_file()),
    "compiler": Need(_has_compiler, ("g++",)),
    "chromium": Need(_has_chromium, ("chromium",)),
    "mmdebstrap": Need(lambda: _as_root("mmdebstrap")),
    "buildah": Need(lambda: _as_root("buildah", "mmdebstrap")),
    "runc": Need(lambda: _as_root("runc")),
    "azurite": Need(lambda: find("azurite-blob")),  # of npm
}
PACKAGES = {
    "git": "git", "ps": "procps", "bash": "bash", "zsh": "zsh",
    "fish": "fish", "tmux": "tmux", "promtool": "prometheus", "prometheus": "prometheus",
    "systemd-analyze": "systemd", "sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync",
    "ip": "iproute2", "node": "nodejs", "npm": "npm", "g++": "g++", "chromium": "chromium",
    "mkfs.ext4": "e2fsprogs",
}  # fmt: skip
"""Debian's, by program."""


@cache
def lacks(what: str) -> bool:
    """Return whether this machine has no `what`, one of the names above."""
    return not NEEDS[what].is_there()


def packages(programs: Iterable[str]) -> list[str]:
    """Return the Debian packages of those of the programs that aren't there."""
    return sorted({PACKAGES[program] for program in programs if find(program) is None})


if __name__ == "__main__":  # prints what .ci/run installs
    print(*packages(PACKAGES))
