"""Which events changed how fast the run is: pure."""

from collections.abc import Iterable

from trainctl.protocol import messages as m

_VERBS = frozenset({"rebalance", "resize-batch", "set-global-batch", "drain", "admit"})
PLAN_VERBS = _VERBS | {"set-lr"}
"""What makes a new version of the plan, where it changes anything."""


def took_effect(event: m.Event) -> bool:
    """Whether the event is of something that was applied at a step, and left it other than it was."""
    applied = event.step is not None and event.outcome in (None, "applied")
    return applied and (event.before is None or event.before != event.after)


def changes_speed(event: m.Event) -> bool:
    """Whether it gave ranks other shares or micro-batches, by a command or by itself."""
    return event.verb in _VERBS and took_effect(event)


def changed_step(events: Iterable[m.Event], run: str) -> int:
    """The step of the run's last such event; 0 where none is known."""
    return max((event.step or 0 for event in events if event.run == run and changes_speed(event)), default=0)
