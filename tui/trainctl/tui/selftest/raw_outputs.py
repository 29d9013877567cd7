"""Raw outputs of the system's own programs, which tests can replay where there is no such machine."""

import asyncio
import contextlib
import platform
import shutil
from collections.abc import Callable
from typing import Any, Final

from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, passed
from trainctl.tui.selftest.shared_parts import SharedParts

_NETWORK: Final = ("netstat", "-ibn")
_NVIDIA: Final = ("nvidia-smi", "-q")
COMMANDS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "Darwin": {
        "system version": ("sw_vers",),
        "hardware": ("sysctl", "hw", "machdep.cpu"),
        "thermal pressure": ("notifyutil", "-g", "com.apple.system.thermalpressurelevel"),
        "thermal limits": ("pmset", "-g", "therm"),
        "battery": ("pmset", "-g", "batt"),
        "power settings": ("pmset", "-g"),
        "lid": ("ioreg", "-r", "-k", "AppleClamshellState", "-d", "1"),
        "memory": ("vm_stat",),
        "memory pressure": ("memory_pressure", "-Q"),
        "swap": ("sysctl", "vm.swapusage"),
        "gpu memory": ("sysctl", "iogpu"),
        "graphics": ("system_profiler", "-json", "-detailLevel", "mini", "SPDisplaysDataType"),
        "network": _NETWORK,
        "tcp": ("netstat", "-s", "-p", "tcp"),
        "macmon": ("macmon", "pipe", "-s", "3"),
        "services": ("launchctl", "version"),
    },
    "Linux": {
        "nvidia": _NVIDIA,
        "nvidia processes": ("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv"),
        "systemd": ("systemctl", "--version"),
        "user services": ("systemctl", "--user", "is-system-running"),
        "processor": ("lscpu",),
        "pressure": ("cat", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io"),
    },
}
"""By system and title: programs that only read, and need no root."""
SECONDS: Final = 10.0
"""Time for one program."""
MOST_CHARACTERS: Final = 20_000
"""Characters of an output that are kept."""


async def recordings(_: SharedParts) -> CheckOutcome:
    """Outputs of the programs that are there."""
    commands = COMMANDS.get(platform.system(), {})
    there = {title: words for title, words in commands.items() if _path(words[0]) is not None}
    if not there:
        return absent("none of the programs whose output is recorded is on PATH")
    outputs = dict(zip(there, await asyncio.gather(*map(_output, there.values())), strict=True))
    missing = sorted({words[0] for title, words in commands.items() if title not in there})
    said = f"recorded {', '.join(there)}"
    return passed(said, *([f"not on PATH: {', '.join(missing)}"] if missing else []), outputs=outputs)


def _path(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin")


async def _output(words: tuple[str, ...]) -> dict[str, Any]:
    """A program's exit status and output; without them if it takes too long."""
    path = _path(words[0])
    assert path is not None
    process = await asyncio.create_subprocess_exec(
        path, *words[1:], stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    text, known = b"", {"command": " ".join(words)}
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                text, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    output = _FILTERS.get(words, str)(text.decode("utf-8", "replace"))
    return {**known, "exit_status": process.returncode, "output": output[:MOST_CHARACTERS]}


# ---------------------------------------------------------------- what must not be recorded: pure


def without_addresses(text: str) -> str:
    """The output of `netstat -ibn` without networks and addresses, which are written in parts that look like figures.
    Lines without an address, and all columns of figures, stay in their order."""
    head, *lines = text.splitlines() or [""]
    titles = head.split()
    if titles[2:4] != ["Network", "Address"]:
        return "" if text.strip() else text
    figures = len(titles) - 4
    rows = [line.split() for line in lines]
    return "\n".join([head, *(" ".join(_without_network(row, figures)) for row in rows if len(row) > figures + 2)])


def _without_network(row: list[str], figures: int) -> list[str]:
    network = row[2] if row[2].startswith("<Link#") else "<network>"
    return [*row[:2], network, *["<address>"] * (len(row) > figures + 3), *row[-figures:]]


def without_processes(text: str) -> str:
    """The output of `nvidia-smi -q` without the lines of processes, which name what others run."""
    kept, inside = list[str](), False
    depth = 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        inside = inside and (indent > depth or not line.strip())
        if not inside:
            kept.append(line)
        if not inside and line.strip().startswith("Processes"):
            inside, depth = True, indent
    return "\n".join(kept)


_FILTERS: Final[dict[tuple[str, ...], Callable[[str], str]]] = {
    _NETWORK: without_addresses, _NVIDIA: without_processes,
}  # fmt: skip
