"""Calibrations that clients ask for: one at a time, by a process of its own, whose profile this node stores."""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import tomli_w

from trainctl.node_agent.calibration.link_meter import LinkMeter
from trainctl.node_agent.calibration.stored_profiles import StoredProfiles
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs.context import AgentContext
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import (
    CalibrationLine,
    CalibrationProgress,
    CalibrationResult,
    CalibrationWaits,
    DeviceProfile,
    LinkRate,
)
from trainctl.protocol.config import env_policy, run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.machine.devices import resolve_alone
from trainctl.protocol.record.paths import RunPaths

MOST_LINES: Final = 200
"""Lines of progress that are kept, the newest."""
LINE_BYTES: Final = 1 << 20
"""Longest line that the process may print: a profile of many nodes' links is far shorter."""
CLIENT_SECONDS: Final = 180.0
"""Silence of the client after which a calibration beside others, which waits for it, ends. The client may run on the
same machine, which is busy measuring."""
Resolve = Callable[[RunFile], Awaitable[RunFile]]
_PREFIX: Final = "calibration-"
"""Start of the names of folders that hold a calibration's temporary files."""
_log: Final = logging.getLogger(__name__)


class _Calibration:
    """One calibration; it stays here after its end, so that its client can get the result."""

    def __init__(self, request: m.CalibrateRequest) -> None:
        self.id, self.beside, self.lead = request.calibration, request.beside, request.lead
        self.heard_monotonic, self.stage = time.monotonic(), request.stage
        self.waits = 0  # the stage that the process is ready for
        self.process: Process | None = None
        self.progress: list[str] = []
        self.profile: DeviceProfile | None = None
        self.earlier: DeviceProfile | None = None
        self.problem = ""
        self.task: asyncio.Task[None] | None = None

    def reply(self, rid: str) -> m.Calibration:
        state: Literal["running", "finished", "failed"] = "running"
        if self.problem or self.profile is not None:
            state = "failed" if self.problem else "finished"
        return m.Calibration(
            rid=rid, state=state, progress=tuple(self.progress[-MOST_LINES:]), profile=self.profile,
            earlier=self.earlier, problem=self.problem, waits=self.waits,
        )  # fmt: skip

    def hear(self, request: m.CalibrateRequest) -> None:
        """Its client asks again: what may begin, or that it is to end."""
        self.heard_monotonic = time.monotonic()
        if request.cancel:
            self.cancel()
        elif request.stage > self.stage:
            self.stage = request.stage
            self.tell_stage()

    def cancel(self) -> None:
        """End it, once; its process is ended before its task."""
        if self.task is not None and not self.task.cancelling():
            self.task.cancel()

    def tell_stage(self) -> None:
        """To the process, if it lives: what may begin."""
        if self.beside and self.process is not None and self.process.stdin is not None:
            self.process.stdin.write(b"%d\n" % self.stage)

    def check_client(self) -> None:
        """Raises RefusedError if it waits for others and no client is there to end that."""
        if self.beside and time.monotonic() - self.heard_monotonic > CLIENT_SECONDS:
            raise RefusedError("the client that calibrated several nodes at once was not heard from any more")


class CalibrationHost:
    """No run and no separate work starts here during a calibration, and no calibration during one of them."""

    def __init__(
        self, context: AgentContext, role: AgentRole, profiles: StoredProfiles, links: LinkMeter,
        attached: Callable[[], Sequence[str]] = tuple, resolve: Resolve | None = None,
    ) -> None:  # fmt: skip
        """`attached`: IDs of the attached runs that train now. `resolve`: adds what depends on the machines of a run
        file's nodes, as at a run's start; raises InvalidInputError if it can't. Removes what a killed agent left of a
        calibration."""
        self._attached, self._resolve = attached, resolve
        for left in context.directory.glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._context, self._role, self._profiles, self._links = context, role, profiles, links
        self._newest: _Calibration | None = None

    async def reply(self, request: m.CalibrationRequest) -> m.AgentReply:
        """Carry out a request, or say why not."""
        try:
            if isinstance(request, m.ProfilesRequest):
                found = await asyncio.to_thread(self._profiles.newest, request.limit)
                return m.Profiles(rid=request.rid, profiles=found)
            if isinstance(request, m.LinkRequest):
                return await self._links.reply(request)
            return self._asked(request).reply(request.rid)
        except InvalidInputError as error:
            return m.Refusal(rid=request.rid, code="malformed", text=str(error))
        except (RefusedError, OSError) as error:
            return m.Refusal(rid=request.rid, code="busy", text=str(error))

    async def close(self) -> None:
        """End the process, and the measurement of a link."""
        await self._links.close()
        if self._newest is not None and self._newest.task is not None:
            self._newest.cancel()
            await asyncio.gather(self._newest.task, return_exceptions=True)

    def _asked(self, request: m.CalibrateRequest) -> _Calibration:
        """The calibration that was requested before, or a new one. Raises InvalidInputError or RefusedError."""
        if self._newest is not None and self._newest.id == request.calibration:
            self._newest.hear(request)
            return self._newest
        if request.cancel:
            raise RefusedError(f"{self._context.node} has no calibration {request.calibration}")
        node = self._context.node
        config = run_file.parse(request.config, "config") if request.config else self._newest_config()
        if config.nodes and node not in config.nodes:
            raise InvalidInputError("config: nodes", f"{node} is not in it")
        resolve_alone(config, node, "config")
        if not self._role.is_idle:
            run = self._role.run or (self._role.followed.run if self._role.followed is not None else "a run")
            raise RefusedError(f"{node} takes part in {run}; stop the run, or calibrate after its end")
        if attached := self._attached():
            raise RefusedError(f"the attached run {attached[0]} trains on {node}; calibrate after its end")
        self._role.check_no_work()
        self._newest = made = _Calibration(request)
        self._role.is_calibrating = True
        made.task = asyncio.create_task(self._run(made, config), name="calibration")
        made.task.add_done_callback(lambda _: self._ended(made))
        return made

    def _ended(self, calibration: _Calibration) -> None:
        """Also of one that was cancelled before it had begun; the second time it changes nothing."""
        if self._newest is calibration:
            self._role.is_calibrating = False
        if calibration.profile is None and not calibration.problem:
            calibration.problem = "the calibration was cancelled"

    def _newest_config(self) -> RunFile:
        known = next((one for one in self._context.db.runs() if one.kind == "hosted"), None)
        if known is None:
            raise InvalidInputError("RUN.toml", f"{self._context.node} has had no run yet; name a run file")
        return run_file.read(RunPaths(known.directory).run_file)

    async def _run(self, calibration: _Calibration, config: RunFile) -> None:
        folder, lead = None, calibration.lead
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._context.directory))
            config = await self._resolved(calibration, config)
            profile = await self._measured(calibration, config, folder)
            if lead is not None and lead != self._context.node:
                profile = msgspec.structs.replace(profile, links=await self._link(calibration, lead))
            profile = msgspec.structs.replace(profile, beside=calibration.beside)
            calibration.earlier = await asyncio.to_thread(self._profiles.comparable, profile)
            await asyncio.to_thread(self._profiles.add, profile)
            calibration.profile = profile
        except (InvalidInputError, RefusedError, OSError) as error:
            calibration.problem = str(error)
        except Exception as error:  # noqa: BLE001  or its client would wait for ever
            _log.exception("calibration")
            calibration.problem = f"{type(error).__name__}: {error}; {self._context.node}'s agent log has more"
        finally:
            self._ended(calibration)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    async def _resolved(self, calibration: _Calibration, config: RunFile) -> RunFile:
        """Return the run file with the data type that a run of all its nodes would get, or that of this node alone
        where others aren't known; and, where nodes are calibrated beside each other, with their parts of shared
        cores."""
        alone = resolve_alone(config, self._context.node, "config")
        if self._resolve is None or (config.model.dtype != "auto" and not calibration.beside):
            return alone
        try:
            resolved = await self._resolve(config)
        except InvalidInputError as error:
            calibration.progress.append(f"{error}; calibrated in {alone.model.dtype}, which suits this node")
            return alone
        return resolved if calibration.beside else msgspec.structs.replace(config, model=resolved.model)

    async def _link(self, calibration: _Calibration, peer: str) -> tuple[LinkRate, ...]:
        """The link to another node; none if it can't be measured, for which the progress has the reason."""
        try:
            found = await self._links.measured(peer)
        except (TrainctlError, OSError, ValueError) as error:
            calibration.progress.append(f"link to {peer}: not measured: {error}")
            return ()
        calibration.progress.append(
            f"link to {peer}: {found.sent_bytes_per_second / 1e9:.3g} GB/s sent, "
            f"{found.received_bytes_per_second / 1e9:.3g} GB/s received at once"
        )
        return (found,)

    async def _measured(self, calibration: _Calibration, config: RunFile, folder: Path) -> DeviceProfile:
        """What the process measures. Raises RefusedError with its last line if it fails, and OSError."""
        node, file = self._context.node, folder / "run.toml"
        file.write_bytes(tomli_w.dumps(run_file.to_dict(config)).encode())
        caches = run_file.cache_folder(config, node, self._context.directory / "data")
        arguments = [
            str(file),
            "--node",
            node,
            "--caches",
            str(caches),
            *(["--together"] if calibration.beside else []),
        ]
        with (folder / "errors").open("w+b") as errors:
            process = await _started(arguments, config.nodes.get(node, NodeTable()), folder, errors.fileno())
            try:
                calibration.process = process
                calibration.tell_stage()
                profile = await self._heard(calibration, process)
                status = await process.wait()
            finally:
                await _ended(process)
            errors.seek(0)
            told = errors.read().decode("utf-8", "replace").strip().splitlines()
        if profile is None:
            raise RefusedError(told[-1] if told else f"the calibration's process ended with status {status}")
        return profile

    async def _heard(self, calibration: _Calibration, process: Process) -> DeviceProfile | None:
        profile = None
        assert process.stdout is not None
        async for line in process.stdout:
            calibration.check_client()
            with contextlib.suppress(msgspec.DecodeError):  # what a library prints
                said: CalibrationLine = msgspec.json.decode(line, type=CalibrationLine)
                match said:
                    case CalibrationProgress(text):
                        calibration.progress.append(text)
                    case CalibrationWaits(stage):
                        calibration.waits = stage
                    case CalibrationResult(found):
                        profile = found
        return profile


async def _started(arguments: Sequence[str], table: NodeTable, folder: Path, errors: int) -> Process:
    """With the environment and priority of a trainer; its temporary files are in `folder`."""
    env = env_policy.of_trainers(os.environ, table.env, threads=table.rank_threads) | {"TMPDIR": str(folder)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trainctl.trainer.calibration", *arguments, stdin=PIPE, stdout=PIPE, stderr=errors,
        env=env, limit=LINE_BYTES,
    )  # fmt: skip
    if table.priority is not None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, table.priority)
    return process


async def _ended(process: Process) -> None:
    """End it and what it has started, if it lives: they end with their standard input."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
