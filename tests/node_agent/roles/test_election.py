"""Claims to conduct a run, and an agent's role: each transition is defined or refused."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.node_agent.planning.durable import next_term
from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.roles import role as r
from trainctl.node_agent.roles.election import Claim
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError

RUN = "r-20260101-000000-0000"
ALWAYS_NEWER, GOES_AWAY, SAYS_NOTHING = -1, -2, -3
NAMES = st.sets(st.text("abcdefgh-", min_size=1, max_size=4), min_size=1, max_size=9)


@given(NAMES, st.integers(0, 10_000), st.integers(0, 10_000))
def test_no_two_nodes_ever_claim_one_term(names: set[str], one: int, other: int) -> None:
    claimed = {name: next_term(one, name, names) for name in names}
    later = {name: next_term(other, name, names - {name}) for name in names}
    assert sorted(claimed.values()) == [*range(one + 1, one + 1 + len(names))], "as near above as may be"
    assert all(claimed[a] != later[b] and claimed[a] != claimed[b] for a in names for b in names if a != b)


class Others:
    """Beta's links to the agents of the other two; each refuses all terms below the one in `said`, and None says that
    it is unreachable."""

    def __init__(self, **said: int | None) -> None:
        self.said, self.asked = said, list[tuple[str, int]]()
        self.elsewhere = ""  # a node that takes part in another run
        self.links: Any = {node: Other(node, self) for node in said}

    def is_open(self, node: str) -> bool:
        return self.said[node] is not None


class Other:
    def __init__(self, node: str, others: Others) -> None:
        self.node, self._others, self.line = node, others, SimpleNamespace(open=others.is_open(node))

    async def claim(
        self, term: int, hosted: m.HostedRank, seconds: float, *, resume: bool = False
    ) -> m.PeerConsent | None:
        self._others.asked.append((self.node, term))
        seen = self._others.said[self.node]
        if seen in (None, GOES_AWAY):
            self._others.said[self.node] = None
            return None
        if seen == SAYS_NOTHING:
            return None
        consent = m.PeerConsent(link="l", seq=1, run=RUN, term=term)
        if self.node == self._others.elsewhere:
            refusal = f"{self.node} takes part in another"
            return msgspec.structs.replace(consent, term=0, refusal=refusal, takes_part=True)
        seen = term + 2 if seen == ALWAYS_NEWER else seen
        if term and term >= seen:
            return consent
        return msgspec.structs.replace(consent, term=seen, refusal=f"{self.node} has seen term {seen}")


class Record:
    """Beta's, of the run."""

    run, hosted = RUN, m.HostedRank(RUN, 1, None)

    def keep(self, items: object) -> list[m.KeptCommand]:
        return []


@pytest.fixture
def db(tmp_path):
    with AgentDb(tmp_path / "agent.db") as made:
        made.saw(m.Generation(1, 4))
        yield made


def claim(db: AgentDb, others: Others) -> Claim:
    own: Any = SimpleNamespace(db=db, node="beta")
    peers: Any = others
    return Claim(own, peers, Record(), "gamma")


async def test_a_lead_that_has_seen_a_newer_term_is_asked_in_one_above_it(db: AgentDb) -> None:
    others = Others(alpha=0, gamma=9)
    assert await claim(db, others).consented(old_lead_is_off=False) == 10  # beta's: 1 more than a multiple of 3
    assert others.asked == [("gamma", 0), ("gamma", 10)]
    assert (db.term, db.consented_term(RUN)) == (10, 10)
    others = Others(alpha=15, gamma=None)  # a majority decides
    assert await claim(db, others).consented(old_lead_is_off=False) == 16
    assert others.asked[-1] == ("alpha", 16)


async def test_of_a_lead_that_goes_out_of_reach_meanwhile_a_majority_decides(db: AgentDb) -> None:
    others = Others(alpha=0, gamma=GOES_AWAY)
    assert await claim(db, others).consented(old_lead_is_off=False) == 4
    assert others.asked == [("gamma", 0), ("alpha", 0), ("alpha", 4)]


async def test_a_lead_that_is_in_touch_and_says_nothing_is_left_the_run(db: AgentDb) -> None:
    others = Others(alpha=0, gamma=SAYS_NOTHING)
    with pytest.raises(InvalidInputError, match="gamma leads the run and is connected, but did not answer"):
        await claim(db, others).consented(old_lead_is_off=False)
    assert others.asked == [("gamma", 0)]
    assert db.consented_term(RUN) == 0


async def test_a_node_in_another_run_is_no_part_of_the_majority_that_is_counted_on(db: AgentDb) -> None:
    """Else this node would promise a term that comes to nothing, and obey the old lead no more."""
    others = Others(alpha=0, gamma=None)
    others.elsewhere = "alpha"
    with pytest.raises(InvalidInputError, match=r"1 of 3 nodes agree.*alpha refuses: alpha takes part in another"):
        await claim(db, others).consented(old_lead_is_off=False)
    assert others.asked == [("alpha", 0)]
    assert db.consented_term(RUN) == 0
    assert await claim(db, others).consented(old_lead_is_off=True) == 4


@pytest.mark.parametrize("off", [False, True])
async def test_without_a_majority_in_reach_nobody_consents_but_on_an_operator_s_word(db: AgentDb, off) -> None:
    """Who has consented to a newer term obeys the old lead no more, so that a promotion that fails must not do that."""
    others = Others(alpha=None, gamma=None)
    if off:
        assert await claim(db, others).consented(old_lead_is_off=True) == 4
    else:
        with pytest.raises(InvalidInputError, match="1 of 3 nodes agree, but a majority is 2: gamma is unreachable"):
            await claim(db, others).consented(old_lead_is_off=False)
    assert db.consented_term(RUN) == (4 if off else 0)


async def test_a_lead_that_refuses_is_not_asked_for_ever(db: AgentDb) -> None:
    others = Others(alpha=0, gamma=ALWAYS_NEWER)
    with pytest.raises(InvalidInputError, match="gamma refuses to hand over the run"):
        await claim(db, others).consented(old_lead_is_off=False)
    assert len(others.asked) == 2


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
