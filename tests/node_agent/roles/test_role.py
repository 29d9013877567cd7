"""An agent's role: every transition from every role is either defined or refused, and none leads astray."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.node_agent.roles import role as r


class Session:
    def __init__(self, run: str) -> None:
        self.run = run


SESSION: Any = Session("run-1")
RANK: Any = object()
WAITING = r.WaitingToRestart("run-1", 5.0)
OTHER = r.WaitingToRestart("run-0", 7.0)
ROLES: dict[str, r.Role] = {
    "idle": r.Idle(),
    "starting": r.Starting("run-1"),
    "starting, while another waits": r.Starting("run-1", OTHER),
    "leading": r.Leading(SESSION),
    "closing": r.Closing(SESSION),
    "closing, to restart": r.Closing(SESSION, WAITING),
    "waiting": WAITING,
    "following": r.Following(RANK),
}
TRANSITIONS: dict[str, Callable[[r.AgentRole], None]] = {
    "start": lambda owner: owner.start("run-1"),
    "restart": r.AgentRole.restart,
    "name": lambda owner: owner.name("run-1"),
    "put off": lambda owner: owner.put_off(WAITING),
    "lead": lambda owner: owner.lead(SESSION),
    "close": lambda owner: owner.close(None),
    "close, to restart": lambda owner: owner.close(WAITING),
    "finish": r.AgentRole.finish,
    "follow": lambda owner: owner.follow(RANK),
    "let go": r.AgentRole.let_go,
}
DEFINED: dict[tuple[str, str], r.Role] = {
    ("idle", "start"): r.Starting("run-1"),
    ("idle", "lead"): r.Leading(SESSION),
    ("idle", "follow"): r.Following(RANK),
    ("starting", "name"): r.Starting("run-1"),
    ("starting", "finish"): r.Idle(),
    ("starting", "put off"): WAITING,
    ("starting", "lead"): r.Leading(SESSION),
    ("starting, while another waits", "name"): r.Starting("run-1", OTHER),
    ("starting, while another waits", "finish"): OTHER,
    ("starting, while another waits", "lead"): r.Leading(SESSION),
    ("leading", "close"): r.Closing(SESSION),
    ("leading", "close, to restart"): r.Closing(SESSION, WAITING),
    ("leading", "let go"): r.Idle(),
    ("closing", "finish"): r.Idle(),
    ("closing", "let go"): r.Idle(),
    ("closing, to restart", "finish"): WAITING,
    ("closing, to restart", "let go"): r.Idle(),
    ("waiting", "start"): r.Starting("run-1", WAITING),
    ("waiting", "restart"): r.Starting("run-1"),
    ("waiting", "let go"): r.Idle(),
    ("following", "let go"): r.Idle(),
}


def owner_of(role: r.Role) -> r.AgentRole:
    owner = r.AgentRole()
    owner._now = role
    return owner


@pytest.mark.parametrize("before", ROLES)
def test_each_transition_from_each_role_is_defined_or_refused(before: str) -> None:
    for what, transition in TRANSITIONS.items():
        owner = owner_of(ROLES[before])
        if (before, what) in DEFINED:
            transition(owner)
            assert owner.now == DEFINED[before, what], what
        else:
            with pytest.raises(r.TransitionError):
                transition(owner)
                pytest.fail(f"{what} is not refused")
            assert owner.now is ROLES[before]
    with pytest.raises(r.TransitionError, match="can't put off while Starting"):
        owner_of(r.Starting("run-2")).put_off(WAITING)


@given(st.lists(st.sampled_from(sorted(TRANSITIONS))))
def test_after_any_sequence_it_takes_part_in_one_run_at_most_and_can_become_idle(sequence: list[str]) -> None:
    owner = r.AgentRole()
    for what in sequence:
        before = owner.now
        try:
            TRANSITIONS[what](owner)
        except r.TransitionError:
            assert owner.now is before
        assert (owner.session is None) or (owner.followed is None and owner.waiting is None and not owner.is_starting)
        assert owner.followed is None or (owner.run is None and not owner.is_busy)
        assert owner.is_busy == (owner.run is not None)
        assert _can_end(owner_of(owner.now))


def _can_end(owner: r.AgentRole) -> bool:
    """Bring a role to its end: by a failure to start, the end of a run, word from another node."""
    if owner.is_starting:
        owner.finish()
    if not owner.is_idle:
        owner.let_go()
    return owner.is_idle


async def test_a_change_of_role_is_waited_for_and_not_for_ever() -> None:
    owner = r.AgentRole()
    owner.lead(SESSION)
    waiting = [asyncio.create_task(owner.wait_while(lambda: owner.session is SESSION, 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    owner.close(None)
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    owner.finish()
    await asyncio.gather(*waiting)
    await owner.wait_while(lambda: True, 0.01)
