"""Presence: the people and scripts attached to this agent, dropped when they stop reporting."""

from dataclasses import dataclass

from trainctl.protocol import messages as m

EXPIRY_SECONDS = 20.0
"""Seconds after which a silent client counts as gone; clients report every 5 s."""
MAX_VIEWERS = 64


@dataclass(frozen=True)
class _Seen:
    view: m.Viewer
    heard_monotonic: float


class Presence:
    """The viewers by their own ids; bounded, so that no one can fill the agent's memory with names."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def hear(self, request: m.AttendRequest, now_monotonic: float, now: float) -> tuple[m.Viewer, ...]:
        """Takes down who asks, if it says who it is, and gives the others, oldest first."""
        since = now_monotonic - EXPIRY_SECONDS
        self._seen = {viewer: seen for viewer, seen in self._seen.items() if seen.heard_monotonic > since}
        known = self._seen.get(request.viewer)
        if request.leaving:
            self._seen.pop(request.viewer, None)
        elif request.viewer and (known is not None or len(self._seen) < MAX_VIEWERS):
            since_at = known.view.since_at if known is not None else now
            view = m.Viewer(by=request.by, since_at=since_at, read_only=request.read_only)
            self._seen[request.viewer] = _Seen(view, now_monotonic)
        others = [seen.view for viewer, seen in self._seen.items() if viewer != request.viewer]
        return tuple(sorted(others, key=lambda view: view.since_at))
