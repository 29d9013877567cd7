"""Spot notices: a command of this machine that says whether its provider is about to take it back."""

import asyncio

from trainctl.node_agent.alerts.hooks import run_command
from trainctl.node_agent.roles.own_drain import NodeDrain
from trainctl.node_agent.services.agent_log import log

INTERVAL_SECONDS = 5.0
"""Seconds between the end of a command and the next one. Providers give notice 30 s to 2 min before."""
COMMAND_SECONDS = 10.0
"""Seconds that a command may take before it is killed; then there is no notice."""
WHY = "a spot notice"


class SpotNotice:
    """Runs the command again and again: exit status 0 is a notice, which any other status withdraws."""

    def __init__(self, command: tuple[str, ...], drain: NodeDrain) -> None:
        self._command, self._drain = command, drain
        self._is_given = False

    async def serve(self) -> None:
        """Drain this node when there is a notice, and have it back when the notice is withdrawn."""
        while True:
            self._take(given=not await run_command(self._command, b"", {}, COMMAND_SECONDS))
            await asyncio.sleep(INTERVAL_SECONDS)

    def _take(self, *, given: bool) -> None:
        if given == self._is_given:
            return
        self._is_given = given
        log.warning("spot notice: %s", "this node's rank leaves its run" if given else "withdrawn")
        if given:
            self._drain.begin(WHY, exits=False)
        else:
            self._drain.call_off()
