"""Spot notices: a command of this machine that says whether its provider is about to take it back."""

import asyncio

from trainctl.node_agent.alerts.hooks import Outcome, run_command
from trainctl.node_agent.roles.drains import NodeDrain
from trainctl.node_agent.services.supervision import log

INTERVAL_SECONDS = 5.0
"""Seconds between the end of a command and the next one. Providers give notice 30 s to 2 min before."""
COMMAND_SECONDS = 10.0
"""Seconds that a command may take before it is killed; then it says nothing about a notice."""
WITHDRAWN_AFTER = 3
"""Exit statuses other than 0 in a row that withdraw a notice: a single one may be a failed request."""
WHY = "a spot notice"


class SpotNotice:
    """Runs the command again and again: exit status 0 is a notice, which several other statuses in a row withdraw."""

    def __init__(self, command: tuple[str, ...], drain: NodeDrain) -> None:
        self._command, self._drain = command, drain
        self._is_given, self._others = False, 0
        self._has_failed = False

    async def serve(self) -> None:
        """Drain this node when there is a notice, and have it back when the notice is withdrawn."""
        while True:
            self.take(await run_command(self._command, b"", {}, COMMAND_SECONDS))
            await asyncio.sleep(INTERVAL_SECONDS)

    def take(self, outcome: Outcome) -> None:
        """Take the outcome of a command. One that was killed, or couldn't be started, changes nothing."""
        if outcome.status is None:
            if not self._has_failed:
                log.warning("spot notice: %s", outcome.problem)
            self._has_failed = True
            return
        self._others = 0 if outcome.status == 0 else self._others + 1
        given = outcome.status == 0 or (self._is_given and self._others < WITHDRAWN_AFTER)
        if given != self._is_given:
            self._change(given=given)

    def _change(self, *, given: bool) -> None:
        self._is_given = given
        log.warning("spot notice: %s", "this node's rank leaves its run" if given else "withdrawn")
        if given:
            self._drain.begin(WHY, exits=False)
        else:
            self._drain.call_off()
