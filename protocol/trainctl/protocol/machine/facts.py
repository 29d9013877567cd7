"""Facts of a machine and its installation, read here and judged by `trainctl doctor`; nothing is changed."""

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Final, Literal

from trainctl.protocol.config.variables import MEANINGS
from trainctl.protocol.machine import shim
from trainctl.protocol.machine.cgroups import cpu_quota
from trainctl.protocol.machine.nvidia import without_cards
from trainctl.protocol.messages import DeviceTypes, Facts, FileFacts, InterfaceFacts

Language = Literal["C", "C++"]
_USUAL: Final[dict[Language, tuple[str, tuple[str, ...]]]] = {
    "C": ("CC", ("gcc", "clang", "cc")),
    "C++": ("CXX", ("clang++",) if sys.platform == "darwin" else ("g++",)),
}
"""The variable that names one, and those that torch looks for."""


def compiler_of(language: Language) -> str | None:
    """Path of the compiler that torch would use; None: there is none."""
    variable, names = _USUAL[language]
    chosen = os.environ.get(variable, "").split()
    return next((path for name in (chosen[:1] or names) if (path := shutil.which(name))), None)


def lacking(kind: str) -> tuple[str, ...]:
    """Return what torch.compile needs for a kind of device (cpu, cuda or mps) and isn't here, in words; empty:
    nothing."""
    language: Language = "C" if kind == "cuda" else "C++"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    found = {
        "triton": kind != "cuda" or importlib.util.find_spec("triton") is not None,
        f"{language} compiler": compiler_of(language) is not None,
        "header files of Python": header.is_file(),
    }
    return tuple(name for name, is_here in found.items() if not is_here)


def lacks_of(found: Mapping[str, tuple[str, ...]] | None, device: str) -> tuple[str, ...] | None:
    """Return what `Facts.compile_lacks` has for a device named as in a run file: "auto" is the first, "gpu" the first
    that isn't the processor. None: not known."""
    if not found:
        return None
    if device == "gpu":
        return next((lacks for kind, lacks in found.items() if kind != "cpu"), None)
    return next(iter(found.values())) if device == "auto" else found.get(device.partition(":")[0])


LIBRARIES = (
    "torch",
    "mlx",
    "mlx-lm",
    "transformers",
    "peft",
    "bitsandbytes",
    "safetensors",
    "numpy",
    "pyzmq",
    "msgpack",
    "msgspec",
    "psutil",
)
_VALUE_CHARACTERS = 200
_LID = Path("/proc/acpi/button/lid")


def gather(
    node: str, keys_folder: Path, state_folder: Path, rid: str = "", devices: Sequence[DeviceTypes] = ()
) -> Facts:
    """This machine's, now; `devices` are those that its backends can compute on. Takes some 50 ms. Needs psutil, which
    the extra `tui` installs."""
    import psutil

    received_at, disk, battery = time.time(), _disk(state_folder), _battery()
    return Facts(
        rid=rid,
        node=node,
        received_at=received_at,
        version=installed_version("trainctl") or "",
        system=platform.system(),
        python=platform.python_version(),
        release=platform.release(),
        machine=platform.machine(),
        libraries={name: found for name in LIBRARIES if (found := installed_version(name))},
        environment={name: os.environ[name][:_VALUE_CHARACTERS] for name in MEANINGS if name in os.environ},
        keys_folder=str(keys_folder),
        key_files=tuple(_key_files(keys_folder)),
        state_folder=str(state_folder),
        disk_free_bytes=disk and disk[0],
        disk_total_bytes=disk and disk[1],
        memory_total_bytes=psutil.virtual_memory().total,
        memory_limit_bytes=memory_limit(),
        open_files=_open_files(),
        interfaces=tuple(_interfaces()),
        on_battery=battery and battery[0],
        battery_percent=battery and battery[1],
        lid_closed=_lid_closed(),
        cpu_count=os.cpu_count(),
        cpu_quota=cpu_quota(),
        boot=shim.boot_id() or None,
        compiler=compiler_of("C++"),
        compile_lacks=_compile_lacks(devices),
        at=time.time(),
        namesakes=_namesakes(),
        devices=tuple(devices),
    )


def _compile_lacks(devices: Sequence[DeviceTypes]) -> dict[str, tuple[str, ...]]:
    """Return what is missing by kind of the devices that torch can compute on, in their order."""
    seen = [one.device for one in without_cards(devices) if one.backend == "torch"]
    kinds = dict.fromkeys(device.partition(":")[0] for device in seen)
    return {kind: lacking(kind) for kind in kinds}


def memory_limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's control group may take, the tightest of it and those above; None without one."""
    try:
        lines = proc.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    limits = [limit for line in lines for folder, name in _limit_files(line, root) if (limit := _limit(folder / name))]
    return min(limits, default=None)


def _limit_files(line: str, root: Path) -> Iterator[tuple[Path, str]]:
    """Return where the limits for one line of /proc/self/cgroup are: `0::/a/b` of version 2, `5:memory:/a/b` of version
    1."""
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if number == "0" and not controllers:
        base, name = root, "memory.max"
    elif "memory" in controllers.split(","):
        base, name = root / "memory", "memory.limit_in_bytes"
    else:
        return
    here = Path(path.lstrip("/"))
    for folder in (here, *here.parents):
        yield base / folder, name


def _limit(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        found = int(file.read_text("ascii"))
        return found if found < 2**60 else None  # version 1 says "none" by a huge number
    return None


def lid_closed_by_ioreg(text: str) -> bool | None:
    """Return whether the lid is closed by what `ioreg -r -k AppleClamshellState -d 4` prints; None for a Mac without a
    lid."""
    found = re.search(r'"AppleClamshellState" = (Yes|No)', text)
    return None if found is None else found[1] == "Yes"


def _lid_closed() -> bool | None:
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/sbin/ioreg", "-r", "-k", "AppleClamshellState", "-d", "4"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
            return lid_closed_by_ioreg(done.stdout)
        return None
    states = []
    with contextlib.suppress(OSError):
        states = [file.read_text("ascii", "replace") for file in _LID.glob("*/state")]
    return any("closed" in state for state in states) if states else None


def _battery() -> tuple[bool | None, float] | None:
    import psutil

    found = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if found is None else (None if found.power_plugged is None else not found.power_plugged, found.percent)


def _disk(folder: Path) -> tuple[int, int] | None:
    """Free and all bytes of the disk that a folder is on, or would be."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(place)
            return usage.free, usage.total
    return None


def _key_files(folder: Path) -> Iterator[FileFacts]:
    with contextlib.suppress(OSError):
        for file in (folder, *sorted(folder.iterdir())):
            found = file.lstat()
            yield FileFacts(path=str(file), mode=stat.S_IMODE(found.st_mode), is_own=found.st_uid == os.getuid())


def _interfaces() -> Iterator[InterfaceFacts]:
    import psutil

    stats = psutil.net_if_stats()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        addresses = tuple(
            IPv4Interface(f"{entry.address}/{entry.netmask or 32}").with_prefixlen
            for entry in entries
            if entry.family == socket.AF_INET
        )
        yield InterfaceFacts(name=name, is_up=name in stats and stats[name].isup, addresses=addresses)


def _open_files() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _namesakes() -> tuple[str, ...]:
    """Return the installed packages with trainctl's names that aren't this program, with their versions."""
    foreign = [each for each in distributions(name="trainctl") if not _starts_us(each)]
    return tuple(sorted({f"{each.name} {each.version}" for each in (*foreign, *distributions(name="trainctl-client"))}))


def _starts_us(package: Distribution) -> bool:
    return any(script.value.startswith("trainctl.tui") for script in package.entry_points)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None where it isn't."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
