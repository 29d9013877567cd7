"""Each policy by itself: facts in, a proposal out."""

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.autopilot.policies import REGISTRY
from trainctl.node_agent.autopilot.policy import (
    Measured,
    Memory,
    MemoryDeath,
    Occasion,
    Proposal,
    Replayed,
    RunFacts,
    mode_of,
)
from trainctl.node_agent.planning import plans
from trainctl.node_agent.planning.durable import Durable, PolicyState
from trainctl.protocol.config.policies import POLICIES, PolicyName
from trainctl.protocol.messages import events as e
from trainctl.protocol.messages import verbs

TIMED = {"group": {"first_shares": "timed"}}
KEPT = durable(("a", "b"), 12)


def proposed(name: PolicyName, occasion: Occasion, kept: Durable = KEPT, **tables: Any) -> Proposal | None:
    return REGISTRY[name].propose(RunFacts(config(20, 12, **tables), kept, 0, occasion), Memory())


def with_micro(micro: int) -> Durable:
    ranks = {rank: msgspec.structs.replace(of, micro_batch=micro) for rank, of in KEPT.settings.ranks.items()}
    return msgspec.structs.replace(KEPT, settings=msgspec.structs.replace(KEPT.settings, ranks=ranks))


def test_no_policy_that_changes_the_curve_is_on_by_default() -> None:
    assert {name for name, entry in POLICIES.items() if entry.changes_curve and entry.default == "on"} == set()
    assert {name for name, entry in POLICIES.items() if entry.changes_curve} == {
        "plateau", "early-stop", "spike", "divergence"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "kept", "mode"),
    [(None, None, "on"), ("off", None, "off"), ("off", "advise", "advise"), (None, "off", "off")],
)
def test_a_mode_is_that_of_commands_else_of_the_run_file_else_the_default(file, kept, mode):
    tables = {"policy": {"replays": {"mode": file}}} if file else {}
    state = {"replays": PolicyState(kept)} if kept else {}
    assert mode_of(config(20, 12, **tables), msgspec.structs.replace(KEPT, policies=state), "replays") == mode


@given(micro=st.integers(1, 64))
def test_a_death_of_memory_halves_until_nothing_is_left_to_halve(micro: int) -> None:
    found = proposed("out-of-memory", MemoryDeath(1, "oom_kill 0 → 1", micro), with_micro(micro))
    if min(micro, 6) == 1:
        assert found is None
        return
    assert found is not None and found.edit is not None
    after = found.edit.settings.ranks
    assert (after[1].micro_batch, after[1].halved_to) == (min(micro, 6) // 2,) * 2
    assert after[0] == with_micro(micro).settings.ranks[0]
    assert (found.verb, found.node, found.args) == ("resize-batch", "b", verbs.ResizeBatch(micro=after[1].micro_batch))
    assert found.reason == "out of memory, oom_kill 0 → 1"


@given(micro=st.integers(1, 12), fitted=st.integers(0, 12))
def test_what_was_run_again_in_pieces_stays_small_and_never_grows(micro: int, fitted: int) -> None:
    kept = with_micro(micro)
    plan = plans.PlanMaker("sim", kept, config(20, 12), 1, 0).train()
    found = proposed("replays", Replayed(plan, report(1, micro_batch=fitted, replays=1)), kept)
    assert (found is not None) == (0 < fitted < micro)
    if found is not None and found.edit is not None:
        assert found.edit.settings.ranks[1].micro_batch == fitted
        assert found.edit.change == e.MicroBatchChanged((("b", min(micro, 6)),), (("b", fitted),))


@given(rates=st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=5), batch=st.integers(5, 4096))
def test_first_shares_are_the_batch_dealt_by_the_rates(rates: list[float], batch: int) -> None:
    kept = durable(tuple("abcde"[: len(rates)]), batch)
    facts = RunFacts(config(20, batch, **TIMED), kept, 0, Measured(dict(enumerate(rates))))
    found = REGISTRY["first-shares"].propose(facts, Memory())
    assert found is not None and found.edit is not None
    shares = {of.node: of.share for of in found.edit.settings.live.values()}
    assert sum(shares.values()) == batch and min(shares.values()) >= 1
    assert found.args == verbs.Rebalance(shares=dict(shares))
    assert "a " in found.reason and "/s" in found.reason
