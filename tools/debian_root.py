"""`python -m tools.debian_root SUITE COMMAND ...`: runs a command in a new Debian system that has only Python and make.

mmdebstrap makes the system once, in build/debian; each command gets a copy of its own, which is deleted afterwards. The
checkout is there, read-only, in the same place as here, and so are the folders that pip's settings name on this
machine. It needs root and mmdebstrap.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tools import pip_settings

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "debian"
PACKAGES = "python3,python3-venv,make"
"""Of the system, beside Debian's essential ones."""
_NETWORK: Final = ("/etc/resolv.conf", "/etc/hosts")
_MOUNT = """set -e; root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind -o ro /sys "$root/sys"
until [ "$1" = -- ]; do mount --bind "$1" "$root$1"; mount -o remount,bind,ro "$root$1"; shift; done
shift; exec chroot "$root" env --chdir="$CHECKOUT" "$@"
"""
"""Its arguments: the system's folder, what is mounted in it, `--`, and the command."""


def archive(suite: str, folder: Path = BUILD) -> Path:
    """The system of a suite, such as bookworm, as a tar file. It is made if it isn't there. Raises CalledProcessError,
    whose `stderr` is what mmdebstrap said."""
    made = folder / f"{suite}.tar"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part:
            file = Path(part) / made.name
            words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", suite, str(file)]
            subprocess.run(words, stdin=subprocess.DEVNULL, check=True, capture_output=True, text=True)
            file.replace(made)
    return made


@contextmanager
def unpacked(suite: str) -> Iterator[Path]:
    """The folder of a new system, deleted in the end."""
    with tempfile.TemporaryDirectory(prefix=f"{suite}-") as folder:
        subprocess.run(["tar", "-xf", archive(suite), "-C", folder], check=True)
        for name in _NETWORK:
            Path(f"{folder}{name}").write_bytes(Path(name).read_bytes())
        yield Path(folder)


def pip_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """pip's settings as environment variables."""
    return {f"PIP_{name.upper().replace('-', '_')}": value for name, value in settings.items()}


def local_paths(environment: Mapping[str, str]) -> Iterator[Path]:
    """The files and folders that settings name, as paths or file URLs. Of an index, the folder that holds it, but for
    the root."""
    for value in environment.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                holds_index = word.startswith("file://") and path.parent != Path(path.anchor)
                yield path.parent if holds_index else path


def command_line(root: Path, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> list[str]:
    """What runs a command in a system, in namespaces of its own for processes and mounts."""
    pip = pip_environment(pip_settings.own())
    binds = {ROOT, *local_paths(pip)}
    for path in binds:
        _make_place(path, Path(f"{root}{path}"))
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "CHECKOUT": str(ROOT),
    } | pip
    variables |= dict(environment or {})
    return [
        "env", "-i", *(f"{name}={value}" for name, value in variables.items()),
        "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _MOUNT, "sh", str(root),
        *map(str, sorted(binds)), "--", *map(str, command),
    ]  # fmt: skip


def _make_place(path: Path, place: Path) -> None:
    """Something of the same kind, on which a path can be mounted."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        place.mkdir(exist_ok=True)
    else:
        place.touch()


def main(arguments: Iterable[str] | None = None) -> int:
    """The command's exit status."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if problem := lacking(given):
        sys.stderr.write(f"debian_root: {problem}\n")
        return 2
    suite, *command = given
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the copy is deleted
    try:
        with unpacked(suite) as root:
            return subprocess.run(command_line(root, command), check=False).returncode
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"debian_root: {error.cmd[0]} failed: {(error.stderr or 'see above').strip()}\n")
        return 1


def lacking(arguments: Sequence[str]) -> str:
    """What keeps a command from being run here, and what to do about it; empty if nothing does."""
    if len(arguments) < 2:
        return "needs a Debian suite and a command, such as: trixie python3 --version"
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap not found; install it: apt-get install mmdebstrap"
    return "" if os.geteuid() == 0 else "this needs root; run it again with sudo"


if __name__ == "__main__":
    sys.exit(main())
