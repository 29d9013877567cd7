"""The machine that is added: the Python found there, and the program's wheel, installed there in an environment of its
own. The wheel is that of the program as it runs here, also from a checkout; it needs no build tool.

Its layout: https://packaging.python.org/en/latest/specifications/binary-distribution-format.
"""

import base64
import hashlib
import io
import json
import posixpath
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from trainctl import protocol
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.tui.setup import installed
from trainctl.tui.setup.rsync import Ssh

PACKAGES = ("protocol", "guest", "trainer", "node_agent", "tui")
_STAMP = (1980, 1, 1, 0, 0, 0)
"""Time of every file in the wheel, so that equal files make equal bytes."""
_LEFT_OUT = ("__pycache__", ".pyc")
_WHEEL = "Wheel-Version: 1.0\nGenerator: trainctl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class Wheel:
    """One that can be given to pip."""

    name: str  # trainctl-0.2.0-py3-none-any.whl
    body: bytes

    @property
    def digest(self) -> str:
        """The digest by which another machine tells whether it has it already."""
        return hashlib.sha256(self.body).hexdigest()


def build_wheel() -> Wheel:
    """Return the program's wheel. Raises InvalidInputError where the program isn't installed; an editable installation
    will do."""
    remedy = "in the checkout, run make, or pip install '.[tui]'"
    try:
        own = distribution("trainctl")
    except PackageNotFoundError:
        raise InvalidInputError("trainctl", f"its metadata is missing on this machine: {remedy}") from None
    metadata = own.read_text("METADATA")
    if metadata is None or own.version != protocol.__version__:
        other = "incomplete" if metadata is None else f"of another package, version {own.version}"
        raise InvalidInputError("trainctl", f"its metadata is {other}: {remedy}")
    label = f"trainctl-{own.version}"
    info = f"{label}.dist-info"
    files = dict(_sources()) | {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": _WHEEL.encode()}
    scripts = own.read_text("entry_points.txt")
    if scripts is not None:
        files[f"{info}/entry_points.txt"] = scripts.encode()
    return Wheel(f"{label}-py3-none-any.whl", _packed(files, f"{info}/RECORD"))


def _sources() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        spec = find_spec(f"trainctl.{package}")
        if spec is None or not spec.submodule_search_locations:
            raise InvalidInputError("trainctl", f"its part {package} isn't installed here")
        folder = Path(spec.submodule_search_locations[0])
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not _is_left_out(file.relative_to(folder)):
                yield f"trainctl/{package}/{file.relative_to(folder).as_posix()}", file.read_bytes()
        if package == "tui":
            for page in installed.files():
                yield f"trainctl/tui/{installed.INSTALLED}/{page.name}", page.read_bytes()


def _is_left_out(file: Path) -> bool:
    return file.parts[0] == installed.INSTALLED or any(part.endswith(_LEFT_OUT) for part in file.parts)


def _packed(files: dict[str, bytes], record: str) -> bytes:
    lines = [f"{name},sha256={_digest(body)},{len(body)}" for name, body in files.items()]
    files = files | {record: ("\n".join([*lines, f"{record},,"]) + "\n").encode()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            entry = zipfile.ZipInfo(name, _STAMP)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, body, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _digest(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")


INSTALL_SECONDS = 3600.0
"""torch is gigabytes."""
HOME = ".local/share/trainctl"
_ABOUT = (
    "import json, os, platform, socket, sys; print(json.dumps({'python': sys.executable, "
    "'version': platform.python_version(), 'system': platform.system(), 'host': socket.gethostname(), "
    "'home': os.path.expanduser('~'), 'connection': os.environ.get('SSH_CONNECTION', '')}))"
)
_NAMES = " ".join(
    ["python3.13", "python3.12", "python3.11", "python3.14", "python3"]
    + [f"/opt/homebrew/bin/python3.{minor}" for minor in (13, 12, 11, 14)]
    + [f"/usr/local/bin/python3.{minor}" for minor in (13, 12, 11, 14)]
)
_FIND = f"""
for name in ${{1:-{_NAMES}}}; do
  if command -v "$name" >/dev/null 2>&1 && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
  then exec "$name" -c "$2"; fi
done
echo "no Python 3.11 or newer there (looked for ${{1:-{_NAMES}}})" >&2; exit 3
"""
_WORKS = '''grep -q "^include-system-site-packages = $2" "$1/pyvenv.cfg" && "$1/bin/python" -c ""'''
_HAS_PIP = "import sys, pip; sys.exit(tuple(int(part) for part in pip.__version__.split('.')[:2]) < (22, 3))"
"""Since 22.3 pip installs into another environment, which then needs none of its own: that takes seconds to make."""
_SEND = 'mkdir -p "$1" && cat > "$1/$2.part" && mv "$1/$2.part" "$1/$2"'


@dataclass(frozen=True)
class RemoteMachine:
    """A machine as ssh reached it."""

    python: str
    version: str
    system: str
    host: str  # as it calls itself
    home: str
    address_here: str  # this machine's, as the other one sees it
    address_there: str  # the other one's, by which it was reached

    @property
    def folder(self) -> str:
        """Return where the program is."""
        return posixpath.join(self.home, HOME)

    @property
    def python_of_program(self) -> str:
        return posixpath.join(self.folder, "venv", "bin", "python")


def find(ssh: Ssh, python: str | None) -> RemoteMachine:
    """Return the machine that ssh reaches. Raises UnreachableError, RefusedError as `Ssh.run` does."""
    out = ssh.run(["sh", "-c", _FIND, "sh", python or "", _ABOUT], seconds=120, step="connect")
    try:
        facts = json.loads(out.strip().splitlines()[-1])
        here, _, there, _ = facts.pop("connection").split()
    except (ValueError, IndexError, KeyError):
        raise RefusedError(f"connect: unexpected answer: {out[:200]!r}") from None
    return RemoteMachine(**facts, address_here=_plain(here), address_there=_plain(there))


def _plain(address: str) -> str:
    """Leave out what IPv6 puts around an IPv4 address, or the interface behind one of its own."""
    return address.removeprefix("::ffff:").partition("%")[0]


@dataclass(frozen=True)
class Install:
    """The way in which the program is installed there."""

    python: str | None = None  # None: the first that is new enough
    extras: tuple[str, ...] | None = None  # None: mlx on macOS, torch elsewhere
    pip: tuple[str, ...] = ()  # further words for pip
    system_site_packages: bool = False

    def carry_out(self, ssh: Ssh, machine: RemoteMachine, wheel: Wheel) -> tuple[bool, str]:
        """Return whether anything was done, and what there is. Raises RefusedError with what was said there."""
        extras = self.extras if self.extras is not None else (("mlx",) if machine.system == "Darwin" else ("torch",))
        _check(extras)
        extras = tuple(dict.fromkeys(("tui", *extras)))
        label = f"{wheel.name.removesuffix('-py3-none-any.whl').replace('-', ' ')}[{','.join(extras)}]"
        mark = " ".join([wheel.digest, *extras, machine.python, *self.pip, str(self.system_site_packages)])
        marker = posixpath.join(machine.folder, "installed")
        status, kept, _ = ssh.try_run(["cat", marker], step="install")
        if status == 0 and kept.strip() == mark:
            return False, f"{label} is already installed in {machine.folder}"
        folder, file = machine.folder, posixpath.join(machine.folder, wheel.name)
        ssh.run(["rm", "-f", marker], step="install")
        ssh.run(["sh", "-c", _SEND, "sh", folder, wheel.name], given=wheel.body, seconds=300, step="install (send)")
        status, _, _ = ssh.try_run([machine.python, "-c", _HAS_PIP], step="install (pip)")
        own = machine.python_of_program
        is_new = self._make_environment(ssh, machine, with_pip=bool(status))
        pip = [own, "-m", "pip"] if status else [machine.python, "-m", "pip", "--python", own]
        step = "install (pip)"
        if not is_new:
            # 0.2.0 had the files of trainctl.protocol in a package of their own, which must not remove ours later.
            ssh.run([*pip, "uninstall", "--quiet", "--yes", "trainctl-client"], seconds=300, step=step)
        pip += ["install", "--quiet", "--disable-pip-version-check", *self.pip]
        ssh.run([*pip, f"{file}[{','.join(extras)}]"], seconds=INSTALL_SECONDS, step=step)
        if not is_new:
            # It may be the same version with other contents, which pip would take for installed.
            ssh.run([*pip, "--no-deps", "--force-reinstall", file], seconds=300, step=step)
        ssh.run(["sh", "-c", 'cat > "$1"', "sh", marker], given=mark.encode(), step="install")
        return True, f"{label} in {folder}, {len(wheel.body) / 1e6:.1f} MB sent"

    def _make_environment(self, ssh: Ssh, machine: RemoteMachine, *, with_pip: bool) -> bool:
        """False if there is one of this kind that works."""
        folder, sees = posixpath.join(machine.folder, "venv"), str(self.system_site_packages).lower()
        status, _, _ = ssh.try_run(["sh", "-c", _WORKS, "sh", folder, sees], step="install (venv)")
        if status:
            site = ["--system-site-packages"] if self.system_site_packages else []
            words = [machine.python, "-m", "venv", "--clear", *site, *([] if with_pip else ["--without-pip"]), folder]
            ssh.run(words, seconds=600, step="install (venv)")
        return bool(status)


def _check(extras: tuple[str, ...]) -> None:
    for extra in extras:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", extra):
            raise InvalidInputError("--extras", f"{extra!r} is not an extra; give torch, mlx, torch,mlx or none")
