"""Containers of an image on this machine, each in namespaces of its own: buildah has the root, runc runs them."""

import contextlib
import json
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.waiting import HANG_SECONDS

PRIVATE = ("pid", "mount", "ipc", "uts")
"""Namespaces that are made with a container; its network's is there already."""
_FLAGS = ["nosuid", "noexec", "nodev"]
_SYSTEM: tuple[dict[str, Any], ...] = (
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
    {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*_FLAGS, "mode=1777"]},
    {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*_FLAGS, "ro"]},
    {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": [*_FLAGS, "mode=1777"]},
)


class Volume(NamedTuple):
    """A folder or file of this machine that a container has at a place."""

    place: str
    source: Path
    writable: bool = False


class Image:
    """An image's root, mounted as long as `mounted` holds, and its settings."""

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        self.root = root
        self.user = [int(part) for part in settings["User"].split(":")]
        self.folder: str = settings["WorkingDir"]
        self.environment: dict[str, str] = dict(line.split("=", 1) for line in settings["Env"])

    @classmethod
    @contextlib.contextmanager
    def mounted(cls, name: str, **env: str) -> Iterator["Image"]:
        """`env`: variables of buildah."""
        settings = json.loads(call("buildah", "inspect", "--type", "image", name, **env))["OCIv1"]["config"]
        working = call("buildah", "from", "--pull-never", name, **env)
        try:
            yield cls(Path(call("buildah", "mount", working, **env)), settings)
        finally:
            call("buildah", "umount", working, **env)
            call("buildah", "rm", working, **env)

    def configuration(
        self, words: Sequence[str], env: Mapping[str, str], volumes: Sequence[Volume], network: Path
    ) -> dict[str, Any]:
        """OCI's settings of a container, with a root that can't be written and no capability."""
        user = dict(zip(("uid", "gid"), self.user, strict=True))
        variables = [f"{name}={value}" for name, value in (self.environment | dict(env)).items()]
        process = {"user": user, "args": [*words], "env": variables, "cwd": self.folder, "noNewPrivileges": True}
        mounts = [
            {"destination": place, "type": "bind", "source": str(source),
             "options": ["rbind", "rw" if writable else "ro"]}
            for place, source, writable in volumes
        ]  # fmt: skip
        namespaces = [{"type": kind} for kind in PRIVATE] + [{"type": "network", "path": str(network)}]
        return {
            "ociVersion": "1.0.0", "process": process, "root": {"path": str(self.root), "readonly": True},
            "hostname": "pod", "mounts": [*_SYSTEM, *mounts], "linux": {"namespaces": namespaces},
        }  # fmt: skip


class Containers:
    """Containers by name; `close` ends those that still run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._mark = folder, f"tc{secrets.token_hex(3)}"
        self._processes: dict[str, subprocess.Popen[str]] = {}
        (folder / "runc").mkdir(parents=True)

    def start(self, name: str, configuration: Mapping[str, Any]) -> "subprocess.Popen[str]":
        """runc's process, which ends with the container and as it did."""
        bundle = self._folder / name
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(configuration), "utf-8")
        command = self._runc("run", "--bundle", str(bundle), "--pid-file", str(bundle / "pid"), self._name(name))
        with (bundle / "log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
        self._processes[name] = process
        return process

    def wait(self, name: str) -> int:
        """The status with which the container ends."""
        return self._processes[name].wait(HANG_SECONDS)

    def said(self, name: str) -> str:
        """All that the container's processes said."""
        return (self._folder / name / "log").read_text("utf-8")

    def init(self, name: str) -> int:
        """The pid of its first process on this machine, 0 if there is none yet."""
        file = self._folder / name / "pid"
        return int(file.read_text("ascii") or 0) if file.is_file() else 0

    def ask(self, name: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container, as its user, to its end."""
        command = self._runc("exec", self._name(name), *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    def terminate(self, name: str) -> None:
        """SIGTERM to its first process."""
        call(*self._runc("kill", self._name(name), "TERM"))

    def left(self) -> list[str]:
        """Those that runc still knows."""
        return [one["id"] for one in json.loads(call(*self._runc("list", "--format", "json"))) or []]

    def close(self) -> None:
        """End all, and wait until they are gone."""
        for name, process in self._processes.items():
            command = self._runc("delete", "--force", self._name(name))
            subprocess.run(command, capture_output=True, timeout=HANG_SECONDS, check=False)
            process.wait(HANG_SECONDS)

    def _name(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _runc(self, *words: str) -> list[str]:
        return ["runc", "--root", str(self._folder / "runc"), *words]


def call(*words: str, **env: str) -> str:
    """Return what a command prints. It must end with status 0."""
    done = subprocess.run(
        words, env={**os.environ, **env}, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()
