"""A real sshd on loopback, its child's: own host key, port and configuration, and a home of its own for who logs in."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from tests.conftest import MARK
from tests.integration.support.ports import free_addresses
from tests.lacking import find
from tests.waiting import HANG_SECONDS


class LoopbackSshd:
    """`with` it, then `ssh -F config there` logs in; `home` is the folder that is the other machine's."""

    def __init__(self, folder: Path) -> None:
        self.home, self.config, self._folder = folder / "home", folder / "ssh_config", folder
        self.log = folder / "sshd.log"

    def __enter__(self) -> "LoopbackSshd":
        program = find("sshd")
        assert program is not None
        self.home.mkdir(parents=True)
        (address,) = free_addresses(1)
        port = int(address.rpartition(":")[2])
        for name in ("host_key", "user_key"):
            file = str(self._folder / name)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
        shutil.copy(self._folder / "user_key.pub", self._folder / "authorized_keys")
        host_key = (self._folder / "host_key.pub").read_text().split()[:2]
        (self._folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(host_key)}\n")
        self._write(port)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it of root
        command = [program, "-D", "-f", str(self._folder / "sshd_config"), "-E", str(self.log)]
        self._process = subprocess.Popen(command)
        self._await(port)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def _write(self, port: int) -> None:
        packages = sysconfig.get_path("purelib")
        variables = {
            "HOME": self.home, "XDG_CONFIG_HOME": self.home / "config", "XDG_STATE_HOME": self.home / "state",
            "XDG_RUNTIME_DIR": self.home / "run", "PYTHONPATH": packages, "PATH": os.environ["PATH"],
            "PIP_CACHE_DIR": self._folder / "cache", MARK: os.environ[MARK],
        }  # fmt: skip
        given = " ".join(f"{name}={value}" for name, value in variables.items())
        (self._folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {self._folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self._folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
            f"PermitRootLogin prohibit-password\nSetEnv {given}\n"
        )
        self.config.write_text(
            f"Host there\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentitiesOnly yes\n"
            f"  IdentityFile {self._folder}/user_key\n  UserKnownHostsFile {self._folder}/known_hosts\n"
            f"  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
        )

    def _await(self, port: int) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            assert self._process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError("sshd doesn't listen")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(HANG_SECONDS)


PYTHON = sys.executable
