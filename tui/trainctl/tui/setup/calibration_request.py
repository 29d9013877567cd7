"""A calibration that a node's agent is asked for, from the request to the profile."""

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

from trainctl.protocol import messages as m
from trainctl.protocol.calibration.peak import peak, slower
from trainctl.protocol.client.client import Client
from trainctl.protocol.errors import RefusedError, UnreachableError

AGAIN_SECONDS = 0.5
"""Time between two looks at a calibration."""
LOST_SECONDS = 30.0
"""Time that an agent may be silent during its calibration."""


async def measured(
    config: dict[str, Any], lead: str | None, tell: Callable[[str], None], client: Client
) -> m.Calibration:
    """The finished calibration of an agent's node, with its link to the lead's; `tell` receives each line of progress.
    Raises RefusedError if it fails, and what the client raises."""
    id, shown, heard = f"calibration-{uuid.uuid4().hex[:12]}", 0, time.monotonic()
    while True:
        try:
            state = await client.calibration(id, config, lead)
        except UnreachableError:
            if time.monotonic() - heard > LOST_SECONDS:
                raise
            continue
        heard = time.monotonic()
        for line in state.progress[shown:]:
            tell(line)
        shown = len(state.progress)
        if state.state == "failed":
            raise RefusedError(state.problem)
        if state.state == "finished":
            return state
        await asyncio.sleep(AGAIN_SECONDS)


def fields(found: m.Calibration) -> dict[str, Any]:
    """A finished calibration as plain fields: profile, the earlier one, the peak, and what got slower."""
    assert found.profile is not None
    fallen = slower(found.earlier, found.profile) if found.earlier is not None else []
    return {
        "profile": found.profile, "earlier": found.earlier, "peak": peak(found.profile.passes).micro,
        "slower": [{**one._asdict(), "fraction": one.fraction} for one in fallen],
    }  # fmt: skip
