"""`python -m tools.debian_root SUITE COMMAND ...`: runs a command in a new Debian system that has only Python and make.

mmdebstrap makes the system once, in build/debian; each command gets a copy of its own, which is deleted afterwards. The
checkout is there, read-only, in the same place as here, and so are the folders that pip's settings name on this
machine. It needs root and mmdebstrap.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BUILD: Final = ROOT / "build" / "debian"
_MOUNT: Final = """set -e; root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind -o ro /sys "$root/sys"
until [ "$1" = -- ]; do mount --bind "$1" "$root$1"; mount -o remount,bind,ro "$root$1"; shift; done
shift; exec chroot "$root" env --chdir="$CHECKOUT" "$@"
"""
"""Its arguments: the system's folder, what is mounted in it, `--`, and the command."""


def pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine by option: the index, folders of wheels, certificates."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # a later section goes before an earlier one
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listed, re.MULTILINE):
            settings[name] = str(ast.literal_eval(value))
    return settings


def bootstrap(suite: str, tar: Path, packages: str, *options: str) -> None:
    """Write a Debian system as a tar file. Raises CalledProcessError, with what mmdebstrap said as `stderr`."""
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", *options, suite, str(tar)]
    subprocess.run(words, stdin=subprocess.DEVNULL, check=True, capture_output=True, text=True)


@contextmanager
def unpacked(suite: str) -> Iterator[Path]:
    """Yield the folder of a new system, such as bookworm, and delete it in the end."""
    archive = BUILD / f"{suite}.tar"
    if not archive.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as part:
            bootstrap(suite, Path(part) / archive.name, "python3,python3-venv,make")
            (Path(part) / archive.name).replace(archive)
    with tempfile.TemporaryDirectory(prefix=f"{suite}-") as folder:
        subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
        for name in ("/etc/resolv.conf", "/etc/hosts"):
            Path(f"{folder}{name}").write_bytes(Path(name).read_bytes())
        yield Path(folder)


def local_paths(settings: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files and folders that settings name; for an index, the folder that holds it, but never the root."""
    for value in settings.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                holds_index = word.startswith("file://") and path.parent != Path(path.anchor)
                yield path.parent if holds_index else path


def command_line(root: Path, command: Sequence[str | Path]) -> list[str]:
    """Return what runs a command in a system, in namespaces of its own for processes and mounts."""
    settings = pip_settings()
    binds = sorted({ROOT, *local_paths(settings)})
    for path in binds:
        place = Path(f"{root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            place.touch()
    programs = "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"
    variables = {"PATH": programs, "HOME": "/root", "LANG": "C.UTF-8", "CHECKOUT": str(ROOT)}
    variables |= {f"PIP_{name.upper().replace('-', '_')}": value for name, value in settings.items()}
    environment = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return [*environment, *namespaces, "sh", "-c", _MOUNT, "sh", *map(str, [root, *binds, "--", *command])]


def lacking(*programs: str) -> str:
    """Return what of programs and rights is missing here, and what to do about it; empty if nothing is."""
    if any(shutil.which(program) is None for program in programs):
        return f"needs {' and '.join(programs)}; install them: apt-get install {' '.join(programs)}"
    return "" if os.geteuid() == 0 else "this needs root; run it again with sudo"


def main(arguments: Sequence[str]) -> int:
    """Return the command's exit status."""
    usage = "" if len(arguments) > 1 else "needs a Debian suite and a command, such as: trixie python3 --version"
    if problem := usage or lacking("mmdebstrap"):
        sys.stderr.write(f"debian_root: {problem}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the copy is deleted
    try:
        with unpacked(arguments[0]) as root:
            return subprocess.run(command_line(root, arguments[1:]), check=False).returncode
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"debian_root: {error.cmd[0]} failed: {(error.stderr or 'see above').strip()}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
