"""The whole self-test: runs checks in a temporary home, says each result, and writes the file to share."""

import contextlib
import getpass
import json
import os
import platform
import pwd
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.config.names import node_name
from trainctl.protocol.files.durable_files import write_file
from trainctl.tui.demo.local_cluster import cancelled_by_signals
from trainctl.tui.selftest.check_runner import Check, run_checks
from trainctl.tui.selftest.redaction import redactor
from trainctl.tui.selftest.report import CheckResult, document
from trainctl.tui.selftest.shared_parts import SharedParts


class SelftestReport(NamedTuple):
    """The results, and the report as it is written."""

    results: tuple[CheckResult, ...]
    document: dict[str, Any]


async def selftest(
    checks: Sequence[Check], total_seconds: float, on_result: Callable[[CheckResult], None]
) -> SelftestReport:
    """Run the checks, and give each result to `on_result` as it comes. If this is cancelled, or gets SIGTERM or SIGHUP,
    it ends what it has started first."""
    begun, started_at = time.monotonic(), time.time()
    found = list[CheckResult]()
    with cancelled_by_signals():
        async with SharedParts() as shared:
            async for result in run_checks(checks, shared, total_seconds):
                found.append(result)
                on_result(result)
            facts = shared.facts
            secrets = [str(shared.home.folder), str(shared.home.runtime), *_folders(), *_keys()]
    redact = redactor(_names(), secrets)
    about = {
        "trainctl": facts.version,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_at)),
        "system": facts.system, "release": redact(facts.release), "machine": facts.machine, "python": facts.python,
    }  # fmt: skip
    made = document(found, about, time.monotonic() - begun, redact)
    return SelftestReport(tuple(found), made)


def default_file(report: dict[str, Any]) -> Path:
    """In the current folder; without the name of the machine."""
    moment = "".join(char for char in report["started_at"] if char.isdigit())
    return Path(f"trainctl-selftest-{platform.system()}-{platform.machine()}-{moment}.json")


def write(report: dict[str, Any], file: Path) -> None:
    """Write the report, whole or not at all. Raises OSError."""
    write_file(file, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())


def _names() -> list[str]:
    """Of this machine and its user."""
    host = socket.gethostname()
    first, _, domain = host.partition(".")
    names = [host, first, platform.node(), node_name(), Path.home().name]
    names += [domain] if "." in domain else []  # one word of it, such as lan or com, is an ordinary one
    with contextlib.suppress(OSError, KeyError, ImportError):
        names.append(getpass.getuser())
    with contextlib.suppress(KeyError):
        whole = pwd.getpwuid(os.getuid()).pw_gecos.partition(",")[0]
        names += [whole, *whole.split()]
    return names


def _folders() -> list[str]:
    """Of this user and this program. A path with spaces can't be recognized by itself."""
    found = {str(Path.home()), sys.prefix, sys.base_prefix, *sys.path}
    with contextlib.suppress(KeyError):
        found.add(pwd.getpwuid(os.getuid()).pw_dir)
    with contextlib.suppress(OSError):
        found.add(str(Path.cwd()))
    whole = [path for path in found if path.startswith("/")]
    return [*whole, *(os.path.realpath(path) for path in whole)]


def _keys() -> list[str]:
    """Values of variables that are keys or tokens."""
    return [value for name, value in os.environ.items() if name.endswith(("_KEY", "_TOKEN", "_SECRET", "_PASSWORD"))]
