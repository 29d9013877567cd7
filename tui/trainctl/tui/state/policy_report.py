"""What the policies of an active run see, and what their newest commands did to the speed: asked of its agent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trainctl.protocol import messages as m
from trainctl.tui.state import effects, plan_changes
from trainctl.tui.state.effects import History

EVENTS = 500
"""Newest events of the run in which disturbances of an effect are looked for."""


class Agent(History, Protocol):
    """The part of an agent's client that this needs."""

    async def policies(self, run: str | None = None) -> m.Policies: ...

    async def events(
        self, run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False
    ) -> m.Events: ...


@dataclass(frozen=True)
class PolicyReport:
    """An answer of the agent, and what was measured."""

    told: m.Policies
    events: tuple[m.Event, ...] = ()  # the run's newest, oldest first
    measured: Mapping[int, effects.Effect] = field(default_factory=dict)  # by event id, of commands that change speed


async def ask(client: Agent, run: str | None, before: PolicyReport | None = None) -> PolicyReport:
    """The report of now; effects that were complete `before` aren't measured again. Raises TrainctlError if the run
    isn't active."""
    told = await client.policies(run)
    actions = [event for policy in told.policies for event in policy.actions]
    events = (await client.events(told.run, limit=EVENTS, newest=True)).events
    found = dict(before.measured) if before is not None and before.told.run == told.run else {}
    complete = {id for id, effect in found.items() if effect.steps_after >= effects.EFFECT_STEPS}
    for event in actions:
        if plan_changes.changes_speed(event) and event.id not in complete:
            effect = await effects.in_record(client, told.run, events, event)
            found |= {event.id: effect} if effect is not None else {}
    return PolicyReport(told, events, found)
