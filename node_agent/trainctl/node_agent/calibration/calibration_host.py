"""Calibrations that clients ask for: one at a time, by a process of its own, whose profile this node stores."""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import tomli_w

from trainctl.node_agent.calibration.link_meter import LinkMeter
from trainctl.node_agent.calibration.stored_profiles import StoredProfiles
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs.context import AgentContext
from trainctl.protocol.calibration.profile import (
    CalibrationLine,
    CalibrationPoint,
    CalibrationProgress,
    CalibrationTrying,
    CalibrationWaits,
    DeviceProfile,
    LinkRate,
)
from trainctl.protocol.config import env_policy, run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.machine.devices import resolve_alone
from trainctl.protocol.messages import (
    AgentReply,
    CalibrateRequest,
    CalibrationRequest,
    Calibrations,
    CalibrationsRequest,
    LinkRequest,
    Refusal,
)
from trainctl.protocol.messages import Calibration as CalibrationReply
from trainctl.protocol.record.paths import RunPaths

MAX_LINES: Final = 200
"""Lines of progress that are kept, the newest."""
LINE_BYTES: Final = 1 << 20
"""Longest line that the process may print: a profile of many nodes' links is far shorter."""
CLIENT_SECONDS: Final = 180.0
"""Silence of the client after which a calibration beside others, which waits for it, ends. The client may run on the
same machine, which is busy measuring."""
SILENT_SECONDS: Final = 300.0
"""Silence after which the process counts as hung. Loading is silent."""
OVERTIME: Final = 0.25
"""Part of calibration.seconds that measuring may take longer."""
Resolve = Callable[[RunFile], Awaitable[RunFile]]
_PREFIX: Final = "calibration-"
"""Start of the names of folders that hold a calibration's temporary files."""
_log: Final = logging.getLogger(__name__)


class _Calibration:
    """One calibration; it stays here after its end, so that its client can get the result."""

    def __init__(self, request: CalibrateRequest) -> None:
        self.id, self.beside, self.lead = request.calibration, request.beside, request.lead
        self.heard_monotonic, self.stage = time.monotonic(), request.stage
        self.process: Process | None = None
        self.point: DeviceProfile | None = None  # the profile so far
        self.trying: int | None = None  # micro-batch whose memory may not suffice
        self.task: asyncio.Task[None] | None = None
        self.answer = CalibrationReply(rid="", state="running")

    def update(self, **fields: Any) -> None:
        self.answer = msgspec.structs.replace(self.answer, **fields)

    def say(self, text: str) -> None:
        self.update(progress=(*self.answer.progress, text)[-MAX_LINES:])

    def hear(self, request: CalibrateRequest) -> None:
        """Take the client's next request: what may begin, or that the calibration is to end."""
        self.heard_monotonic = time.monotonic()
        if request.cancel:
            self.cancel()
        elif request.stage > self.stage:
            self.stage = request.stage
            self.send_stage()

    def cancel(self) -> None:
        """End it, once; its process is ended before its task."""
        if self.task is not None and not self.task.cancelling():
            self.task.cancel()

    def send_stage(self) -> None:
        if self.beside and self.process is not None and self.process.stdin is not None:
            self.process.stdin.write(b"%d\n" % self.stage)

    async def follow(self, process: Process, seconds: float) -> None:
        """Take the process's lines to its end. Raises RefusedError if nobody waits for it, TimeoutError if it is silent
        or measures for too long, ValueError for a line that is too long."""
        self.process = process
        self.send_stage()
        loop = asyncio.get_running_loop()
        begun = heard = loop.time()
        ends, is_waiting = math.inf, False  # of measuring: loading is only silent
        assert process.stdout is not None
        async with asyncio.timeout(SILENT_SECONDS) as limit:
            async for line in process.stdout:
                if self.beside and time.monotonic() - self.heard_monotonic > CLIENT_SECONDS:
                    raise RefusedError("the client that calibrated several nodes at once was not heard from any more")
                now = loop.time()
                ends += now - heard if is_waiting else 0.0  # for other nodes, which doesn't count
                heard, is_waiting = now, False
                with contextlib.suppress(msgspec.DecodeError):  # what a library prints
                    said: CalibrationLine = msgspec.json.decode(line, type=CalibrationLine)
                    match said:
                        case CalibrationProgress(text):
                            self.say(text)
                        case CalibrationTrying(micro):
                            self.trying = micro
                            if ends == math.inf:
                                ends = max(begun + seconds, now + seconds / 2) + OVERTIME * seconds
                        case CalibrationPoint(profile):
                            self.point = profile
                        case CalibrationWaits(stage):
                            is_waiting = True
                            self.update(waits=stage)
                limit.reschedule(now + SILENT_SECONDS if is_waiting else min(now + SILENT_SECONDS, ends))
            await process.wait()


class CalibrationHost:
    """No run and no separate work starts here during a calibration, and no calibration during one of them."""

    def __init__(
        self,
        context: AgentContext,
        role: AgentRole,
        profiles: StoredProfiles,
        links: LinkMeter,
        attached: Callable[[], Sequence[str]] = tuple,
        resolve: Resolve | None = None,
    ) -> None:
        """`attached`: IDs of the attached runs that train now. `resolve`: adds what depends on the machines of a run
        file's nodes, as at a run's start; raises InvalidInputError if it can't. Removes what a killed agent left of a
        calibration."""
        self._attached, self._resolve = attached, resolve
        for left in context.directory.glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._context, self._role, self._profiles, self._links = context, role, profiles, links
        self._newest: _Calibration | None = None

    async def reply(self, request: CalibrationRequest) -> AgentReply:
        """Carry out a request, or say why not."""
        try:
            if isinstance(request, CalibrationsRequest):
                newest = await asyncio.to_thread(self._profiles.newest, request.limit)
                return Calibrations(rid=request.rid, profiles=newest)
            if isinstance(request, LinkRequest):
                return await self._links.reply(request)
            return msgspec.structs.replace(self._calibration(request).answer, rid=request.rid)
        except InvalidInputError as error:
            return Refusal(rid=request.rid, code="malformed", text=str(error))
        except (RefusedError, OSError) as error:
            return Refusal(rid=request.rid, code="busy", text=str(error))

    async def close(self) -> None:
        """End the process, and the measurement of a link."""
        await self._links.close()
        if self._newest is not None and self._newest.task is not None:
            self._newest.cancel()
            await asyncio.gather(self._newest.task, return_exceptions=True)

    def _calibration(self, request: CalibrateRequest) -> _Calibration:
        """Return the calibration that was requested before, or a new one. Raises InvalidInputError or RefusedError."""
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
        self._newest = calibration = _Calibration(request)
        self._role.is_calibrating = True
        calibration.task = asyncio.create_task(self._run(calibration, config), name="calibration")
        calibration.task.add_done_callback(lambda _: self._ended(calibration))
        return calibration

    def _ended(self, calibration: _Calibration) -> None:
        """Let runs start again; also after one that was cancelled before it had begun."""
        self._role.is_calibrating = False
        if calibration.answer.state == "running":
            calibration.update(state="failed", problem="the calibration was cancelled")

    def _newest_config(self) -> RunFile:
        newest = next((run for run in self._context.db.runs() if run.kind == "hosted"), None)
        if newest is None:
            raise InvalidInputError("RUN.toml", f"{self._context.node} has had no run yet; name a run file")
        return run_file.read(RunPaths(newest.directory).run_file)

    async def _run(self, calibration: _Calibration, config: RunFile) -> None:
        folder, lead = None, calibration.lead
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._context.directory))
            config = await self._resolved(calibration, config)
            profile = await self._measured(calibration, config, folder)
            if lead is not None and lead != self._context.node:
                profile = msgspec.structs.replace(profile, links=await self._link(calibration, lead))
            profile = msgspec.structs.replace(profile, beside=calibration.beside)
            earlier = await asyncio.to_thread(self._profiles.comparable, profile)
            await asyncio.to_thread(self._profiles.add, profile)
            calibration.update(state="finished", profile=profile, earlier=earlier)
        except (InvalidInputError, RefusedError, OSError) as error:
            calibration.update(state="failed", problem=str(error))
        except Exception as error:  # noqa: BLE001  or its client would wait for ever
            _log.exception("calibration")
            problem = f"{type(error).__name__}: {error}; {self._context.node}'s agent log has more"
            calibration.update(state="failed", problem=problem)
        finally:
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
            calibration.say(f"{error}; calibrated in {alone.model.dtype}, which suits this node")
            return alone
        return resolved if calibration.beside else msgspec.structs.replace(config, model=resolved.model)

    async def _link(self, calibration: _Calibration, peer: str) -> tuple[LinkRate, ...]:
        """Return the link to another node; none if it can't be measured, for which the progress has the reason."""
        try:
            rate = await self._links.measured(peer)
        except (TrainctlError, OSError, ValueError) as error:
            calibration.say(f"link to {peer}: not measured: {error}")
            return ()
        calibration.say(
            f"link to {peer}: {rate.sent_bytes_per_second / 1e9:.3g} GB/s sent, "
            f"{rate.received_bytes_per_second / 1e9:.3g} GB/s received at once"
        )
        return (rate,)

    async def _measured(self, calibration: _Calibration, config: RunFile, folder: Path) -> DeviceProfile:
        """Return what the process measures, also if it ends early. Raises RefusedError if that is nothing, OSError."""
        node, file, table = self._context.node, folder / "run.toml", config.nodes.get(self._context.node, NodeTable())
        file.write_bytes(tomli_w.dumps(run_file.to_dict(config)).encode())
        caches = run_file.cache_folder(config, node, self._context.directory / "data")
        arguments = [str(file), "--node", node, "--caches", str(caches), *(["--together"] * bool(calibration.beside))]
        program = [sys.executable, "-m", "trainctl.trainer.calibration", *arguments]
        env = env_policy.of_trainers(os.environ, table.env, threads=table.rank_threads) | {"TMPDIR": str(folder)}
        with (folder / "errors").open("w+b") as errors:
            process = await asyncio.create_subprocess_exec(
                *program, stdin=PIPE, stdout=PIPE, stderr=errors.fileno(), env=env, limit=LINE_BYTES
            )
            problem = ""
            try:
                if table.priority is not None:
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, process.pid, table.priority)
                await calibration.follow(process, config.calibration.seconds)
            except TimeoutError:
                problem = "it took more than calibration.seconds and a quarter, and was ended"
            finally:
                await _ended(process)
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
        return _profile(calibration, process.returncode, problem, lines)


def _profile(calibration: _Calibration, status: int | None, problem: str, lines: Sequence[str]) -> DeviceProfile:
    """Return what was measured by a process that ended with `status`; `problem`: why it was ended. Raises RefusedError
    if that is nothing."""
    profile, micro = calibration.point, calibration.trying
    if status == 0 and profile is not None:
        return profile
    if status == 2 and not problem:
        raise RefusedError(lines[-1] if lines else "the calibration failed")
    if not problem and status is not None and status < 0:
        problem = f"the calibration's process was ended by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL and micro is not None:  # as Linux does where memory runs out
            problem = f"micro-batch {micro}: out of memory, and the system ended the process"
            profile = _without_memory_for(profile, micro)
    problem = problem or (lines[-1] if lines else f"the calibration's process ended with status {status}")
    if profile is None:
        raise RefusedError(problem)
    calibration.say(f"not measured further: {problem}")
    return profile


def _without_memory_for(profile: DeviceProfile | None, micro: int) -> DeviceProfile | None:
    """Return a profile of smaller micro-batches only; None if there are none."""
    if profile is None or profile.passes[0].micro >= micro:
        return None
    passes = tuple(timed for timed in profile.passes if timed.micro < micro)
    grid = tuple(point for point in profile.grid if point.micro < micro)
    smallest = min(micro, profile.out_of_memory_micro or micro)
    return msgspec.structs.replace(profile, passes=passes, grid=grid, out_of_memory_micro=smallest)


async def _ended(process: Process) -> None:
    """End it, if it lives: it ends with its standard input."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
