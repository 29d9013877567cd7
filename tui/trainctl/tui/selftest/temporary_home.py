"""A temporary home for the self-test's processes: folders, environment, and processes that end with it."""

import asyncio
import contextlib
import os
import shutil
import signal
import site
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from trainctl.protocol.machine.check_outcome import CheckOutcome, failed
from trainctl.tui.demo.agents import last_line

LEAVE_SECONDS: Final = 20.0
"""Time that a process gets to clean up before it is killed."""
KILLED_SECONDS: Final = 60.0
"""Time that the system gets to end a killed process: it may be slow to free memory, or to finish a write to disk."""
RANK_CHECKS: Final = "trainctl.trainer.selftest.rank_checks"
_OWN: Final = ("TRAINCTL_", "XDG_")
"""Beginnings of variables that would lead processes to the user's files."""


class TemporaryHome:
    """Folders that nothing else uses. `close` removes them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="trainctl-selftest-"))
        self.state = self.folder / "state"
        self.assets = self.folder / "assets"
        temporary = self.folder / "tmp"
        for made in (self.state, self.assets, temporary):
            made.mkdir(mode=0o700)
        self.runtime = Path(tempfile.mkdtemp(prefix="tc-", dir="/tmp"))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        self.environment = kept | {
            "HOME": str(self.folder), "TRAINCTL_STATE": str(self.state), "TRAINCTL_KEYS": str(self.folder / "keys"),
            "TRAINCTL_CLUSTER": str(self.folder / "cluster.toml"), "XDG_RUNTIME_DIR": str(self.runtime),
            "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1",
            "PYTHONUSERBASE": site.getuserbase(),  # where `pip install --user` put this program; else HOME decides
        }  # fmt: skip

    def close(self) -> None:
        """Remove the folders. No process may use them any more."""
        for folder in (self.folder, self.runtime):
            shutil.rmtree(folder, ignore_errors=True)

    async def outcome_of(
        self, module: str, *words: str, environment: dict[str, str] | None = None, leave_seconds: float = LEAVE_SECONDS
    ) -> CheckOutcome:
        """The result that `python -m MODULE WORDS` prints. If this is cancelled, the process is asked to end, and
        killed after `leave_seconds`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", module, *words, env=self.environment if environment is None else environment,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, limit=1 << 22,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        try:
            printed, said = await asyncio.gather(process.stdout.read(), process.stderr.read())
            await process.wait()
        finally:
            await end(process, leave_seconds)
        if not printed.strip():
            how = "nothing" if process.returncode == 0 else f"exit status {process.returncode}"
            return failed(f"the check's process ended with {how}: {last_line(said.decode('utf-8', 'replace'))}")
        return msgspec.json.decode(printed, type=CheckOutcome)


async def end(process: asyncio.subprocess.Process, leave_seconds: float) -> None:
    """Ask a process to end and wait for it, even if this is cancelled again; kill it if it takes too long."""
    if process.returncode is not None:
        return
    ending = asyncio.ensure_future(_end(process, leave_seconds))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise


async def _end(process: asyncio.subprocess.Process, leave_seconds: float) -> None:
    for number, seconds in ((signal.SIGTERM, leave_seconds), (signal.SIGKILL, KILLED_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
                return
