"""Check of a profile: its trace arrives whole, with the phases, kernels or capture that the device must give."""

import asyncio
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trainctl.protocol import messages as m
from trainctl.protocol.client.trace_download import download
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, combined, judged
from trainctl.protocol.messages.events import Profiled, ProfileFailed
from trainctl.tui.demo.local_cluster import POLL_SECONDS, LocalCluster
from trainctl.tui.selftest.shared_parts import SharedParts
from trainctl.tui.selftest.small_runs import MOST_STEPS, backend_table, run_tables

STEPS: Final = 3
"""Steps that are recorded."""
CAPTURE_VARIABLE: Final = "MTL_CAPTURE_ENABLED"
"""What Metal needs in a trainer's environment to capture anything."""
_CAPTURE: Final = "capture.gputrace"
_PHASES: Final = tuple(name for name in m.PHASES if name != "wait")
"""Phases that a trace has: while a rank waits for its next plan, nothing is recorded."""


async def profile(shared: SharedParts) -> CheckOutcome:
    """A few steps of one rank, on each backend's default device."""
    if not shared.backends:
        return absent("neither torch nor mlx is installed")
    return combined([(backend, await _once(shared, backend)) for backend in shared.backends])


async def _once(shared: SharedParts, backend: str) -> CheckOutcome:
    found: CheckOutcome = await shared.once(f"profile {backend}", lambda: _profiled(shared, backend))
    return found


async def _profiled(shared: SharedParts, backend: str) -> CheckOutcome:
    cluster, system = await shared.cluster(), shared.facts.system
    table = backend_table(backend) | ({"env": {CAPTURE_VARIABLE: "1"}} if system == "Darwin" else {})
    view = await cluster.start(config=run_tables(shared.home.assets, {"a": table}, MOST_STEPS))
    await cluster.until_step(1)
    trace = await _trace(cluster, view.run)
    folder = shared.home.folder / f"profile-{backend}"
    folder.mkdir()
    file = await download(cluster.client, view.run, trace, folder)
    await cluster.stop_run()
    device = f"{backend} {view.ranks[0].device}"
    return judge_profile(trace, await asyncio.to_thread(_members, file), device, system)


async def _trace(cluster: LocalCluster, run: str) -> Profiled:
    """What the record has once the trace is written. Raises RefusedError with the reason if it isn't."""
    reply = await cluster.send("profile", {"steps": STEPS})
    if reply.state != "applied":
        raise RefusedError(f"the command was {reply.state}: {reply.reason or 'no reason given'}")
    while True:
        for event in (await cluster.client.traces(run)).profiles:
            if isinstance(event.data, ProfileFailed):
                raise RefusedError(f"no profile: {event.data.reason}")
            if isinstance(event.data, Profiled):
                return event.data
        await asyncio.sleep(POLL_SECONDS)


def _members(file: Path) -> list[str]:
    """Names of what a zip file has; nothing of another file."""
    if not zipfile.is_zipfile(file):
        return []
    with zipfile.ZipFile(file) as archive:
        return archive.namelist()


def judge_profile(trace: Profiled, members: Sequence[str], device: str, system: str) -> CheckOutcome:
    """Whether a profile has all that its device gives."""
    phases = {phase.name: phase for phase in trace.phases}
    recorded, forward = trace.last_step - trace.first_step + 1, phases.get("forward")
    faults = [f"{recorded} of {STEPS} steps were recorded"] if recorded != STEPS else []
    if lacking := [name for name in _PHASES if name not in phases]:
        faults.append(f"the trace lacks the phases {', '.join(lacking)}")
    if device.startswith("torch") and not (forward and forward.operators):
        faults.append("the forward phase has no operators")
    if device.startswith("torch cuda") and not (forward and forward.device_seconds > 0):
        faults.append("the trace has no kernels of the GPU")
    if device == "mlx gpu" and system == "Darwin" and not any(_CAPTURE in name for name in members):
        faults.append("the trace has no Metal capture")
    said = f"{device}: a trace of {STEPS} steps, {trace.size_bytes:,} bytes; the loop waited {trace.loop_seconds:.2f} s"
    figures: dict[str, Any] = {name: phase.seconds for name, phase in phases.items()}
    return judged(
        faults, said, *([trace.lacks] if trace.lacks else []), size_bytes=trace.size_bytes, phase_seconds=figures,
        device_seconds=sum(phase.device_seconds for phase in trace.phases), captured_files=len(members),
        loop_seconds=trace.loop_seconds,
    )  # fmt: skip
