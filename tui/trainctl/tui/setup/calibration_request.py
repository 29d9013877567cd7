"""Calibrations that agents are asked for: of one node, or of a machine's nodes at once, from request to profile.

Nodes of one machine slow each other when they train together, so they measure their passes at the same time: each
stage begins on all of them once all are ready for it, and the parts that need the machine alone come last, one node
after another.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainctl.protocol.calibration.peak import peak, slower
from trainctl.protocol.client.client import Client
from trainctl.protocol.errors import NotConnectedError, RefusedError, TrainctlError, UnreachableError
from trainctl.protocol.messages import CalibrateRequest, Calibration

AGAIN_SECONDS = 0.5
"""Time between two looks at a calibration."""
GONE_SECONDS = 30.0
"""Time without a connection after which a calibration counts as lost."""
LOST_SECONDS = 300.0
"""Time that a connected agent may leave unanswered: on a machine that is busy measuring it may hardly run."""
SLOW_SECONDS = 30.0
"""Time without an answer after which a line says so."""
QUIET = 2
"""Last stage of `CalibrateRequest.stage` that all nodes of a machine begin together."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationTarget:
    """The run and the lead that all nodes are calibrated for."""

    config: dict[str, Any]  # parsed run file; empty: that of each node's newest run
    lead: str | None  # node to which links are measured


class _Calibrating:
    """One node's calibration, as its client follows it."""

    def __init__(self, wanted: CalibrationTarget, client: Client, tell: Tell, beside: tuple[str, ...] = ()) -> None:
        self._id = f"calibration-{uuid.uuid4().hex[:12]}"
        self._wanted, self._client, self._tell, self._beside = wanted, client, tell, beside
        self._shown, self._heard, self._is_slow = 0, time.monotonic(), False
        self.waits = 0  # stage that it is ready for
        self.result: Calibration | TrainctlError | None = None

    async def look(self, stage: int = 0) -> None:
        """Ask once more; its stages up to `stage` may begin."""
        try:
            state = await self._ask(stage=stage)
        except UnreachableError as error:
            self._wait_on(error)
            return
        except TrainctlError as error:
            self.result = error
            return
        self._heard, self._is_slow, self.waits = time.monotonic(), False, state.waits
        for line in state.progress[self._shown :]:
            self._tell(line)
        self._shown = len(state.progress)
        if state.state == "failed":
            self.result = RefusedError(state.problem)
        elif state.state == "finished":
            self.result = state

    def _wait_on(self, error: UnreachableError) -> None:
        """No answer came: it is lost, or only slow."""
        silent = time.monotonic() - self._heard
        if silent > (GONE_SECONDS if isinstance(error, NotConnectedError) else LOST_SECONDS):
            self.result = error
        elif silent > SLOW_SECONDS and not self._is_slow:
            self._tell(f"no answer for {silent:.0f} s: the agent is busy; waiting for it (Ctrl-C cancels)")
        self._is_slow = silent > SLOW_SECONDS

    async def cancel(self) -> None:
        """End it, if its agent answers."""
        if self.result is None:
            with contextlib.suppress(TrainctlError):
                await self._ask(cancel=True)

    async def _ask(self, stage: int = 0, cancel: bool = False) -> Calibration:
        return await self._client.ask(
            CalibrateRequest,
            self._id,
            self._wanted.config,
            self._wanted.lead,
            beside=self._beside,
            stage=stage,
            cancel=cancel,
        )


async def measured(wanted: CalibrationTarget, tell: Tell, client: Client) -> Calibration:
    """Return the finished calibration of an agent's node; `tell` receives each line of progress. Cancelled, it cancels
    the calibration. Raises RefusedError if it fails, and what the client raises."""
    one = _Calibrating(wanted, client, tell)
    await _followed({"": one})
    if isinstance(one.result, Calibration):
        return one.result
    assert one.result is not None, "a calibration that was followed has ended"
    raise one.result


async def measured_together(
    wanted: CalibrationTarget, tell: Callable[[str, str], None], clients: Mapping[str, Client]
) -> dict[str, Calibration | TrainctlError]:
    """Return the calibrations of a machine's nodes, by node, or why one failed; `tell` receives the node and a line of
    progress. Cancelled, it cancels all of them."""

    def of(node: str) -> Tell:
        return lambda line: tell(node, line)

    order = sorted(clients, key=lambda node: node != wanted.lead)  # links need a lead that is done
    ones = {
        node: _Calibrating(wanted, clients[node], of(node), tuple(other for other in clients if other != node))
        for node in order
    }
    await _followed(ones)
    return {node: one.result for node, one in ones.items() if one.result is not None}


async def _followed(ones: Mapping[str, _Calibrating]) -> None:
    """Look at all of them until each has ended."""
    try:
        while waits := {node: one.waits for node, one in ones.items() if one.result is None}:
            stages = may_begin(waits)
            await asyncio.gather(*(ones[node].look(stage) for node, stage in stages.items()))
            if any(ones[node].result is None for node in stages):
                await asyncio.sleep(AGAIN_SECONDS)
    except asyncio.CancelledError:
        await asyncio.gather(*(one.cancel() for one in ones.values()))
        raise


def may_begin(waits: Mapping[str, int]) -> dict[str, int]:
    """Return the stage that each node of a machine may begin, by the stage that each is ready for: what all are ready
    for, but the last one only the first of the nodes."""
    ready = min(waits.values())
    return {node: ready if number == 0 else min(ready, QUIET) for number, node in enumerate(waits)}


def fields(found: Calibration) -> dict[str, Any]:
    """Return a finished calibration as plain fields: profile, the earlier one, the peak, and what got slower."""
    assert found.profile is not None
    fallen = slower(found.earlier, found.profile) if found.earlier is not None else []
    return {
        "profile": found.profile,
        "earlier": found.earlier,
        "peak": peak(found.profile.passes).micro,
        "slower": [{**one._asdict(), "fraction": one.fraction} for one in fallen],
    }
