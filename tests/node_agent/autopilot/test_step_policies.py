"""Policies that look at each step: steps made by hand in, proposals out."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.autopilot.policies import REGISTRY
from trainctl.node_agent.autopilot.policy import Memory, MemoryDeath, Proposal, Replayed, RunFacts, Stepped
from trainctl.node_agent.planning import plans
from trainctl.node_agent.planning.durable import Durable, RankSetting, Settings
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.curve import CurveJudge, CurveLimits
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.config.policies import PolicyName
from trainctl.protocol.messages import Finding, verbs


def kept(micro: int, batch: int = 128) -> Durable:
    made = durable(("a", "b"), batch)
    ranks = {rank: msgspec.structs.replace(of, micro_batch=micro) for rank, of in made.settings.ranks.items()}
    return msgspec.structs.replace(made, settings=msgspec.structs.replace(made.settings, ranks=ranks))


class Asked:
    """One policy over steps, with its memory."""

    def __init__(self, name: PolicyName, micro: int = 32, **settings: Any) -> None:
        tables = {**settings.pop("tables", {}), "policy": {name: settings}}
        self.policy, self.config, self.kept = REGISTRY[name], config(100_000, 128, **tables), kept(micro)
        self.memory, self.step, self.curve = Memory(), 0, CurveJudge(CurveLimits.of(self.config))

    def facts(self, occasion: Any) -> RunFacts:
        return RunFacts(self.config, self.kept, self.step, occasion, self.curve)

    @property
    def plan(self) -> m.StepPlan:
        return plans.PlanMaker("sim", self.kept, self.config, max(self.step, 1), 0).train()

    def stepped(self, **fields: Any) -> Proposal | Finding | None:
        """A step that both ranks report alike."""
        self.step += 1
        reports = {rank: report(rank, self.step, **fields) for rank in (0, 1)}
        self.curve.add(self.step, 2.0, reports[0].grad_norm, reports[0].skipped)
        return self.policy.propose(self.facts(Stepped(self.plan, reports)), self.memory)

    def used(self, *parts: float) -> Iterator[Proposal | Finding | None]:
        """A step for each part of the cap that peaks took."""
        for part in parts:
            yield self.stepped(values={"memory_peak_bytes": part * 1e9, "memory_cap_bytes": 1e9})

    def last(self, *parts: float) -> Proposal | None:
        found = [*self.used(*parts)]
        assert not any(found[:-1])
        assert not isinstance(found[-1], Finding)
        return found[-1]


def test_only_steps_in_a_row_pause_and_each_reason_counts() -> None:
    asked = Asked("non-finite")
    said = [asked.stepped(skipped=why) for why in ("nan", "nan", None, "nan", "overflow", "empty", "nan", "nan")]
    assert not any(said)
    found = asked.stepped(skipped="overflow")
    assert isinstance(found, Proposal) and found.before is not None
    assert (found.before.verb, found.verb, found.severity) == ("checkpoint", "pause", "error")
    assert found.reason == "3 steps in a row were not finite, up to step 9"


def test_an_overflow_in_float16_only_halves_the_loss_scale() -> None:
    asked = Asked("non-finite", tables={"model": {"path": "/model", "dtype": "float16"}})
    assert not any(asked.stepped(skipped="overflow") for _ in range(20))
    assert any(asked.stepped(skipped="nan") for _ in range(3))


@pytest.mark.parametrize(("micro", "after"), [(1, None), (2, 1), (5, 4), (20, 16)])
def test_a_mean_above_the_target_shrinks_by_a_fifth_but_by_at_least_one_sample(micro: int, after: int | None) -> None:
    asked = Asked("micro-batch", micro)
    assert not any(asked.used(*[0.8] * 20, 1.0, *[0.8] * 20)), "one high step shrinks nothing"
    found = Asked("micro-batch", micro).last(*[0.95] * 10)
    assert (found.args if found else None) == (verbs.ResizeBatch(micro=after) if after else None)
    if found is not None:
        assert not found.advise_only and found.node == "a"
        assert found.reason == "mean peak memory over 10 steps: 95 % of the cap; target 90 %"


@pytest.mark.parametrize(("after", "again"), [(0.94, None), (0.91, verbs.ResizeBatch(micro=20))])
def test_a_size_that_hardly_helped_is_the_last(after: float, again: verbs.ResizeBatch | None) -> None:
    asked = Asked("micro-batch")
    first = asked.last(*[0.95] * 10)
    assert first is not None
    asked.memory.kept |= first.remember
    asked.memory.kept |= {name.replace(" a", " b"): value for name, value in first.remember.items()}
    asked.kept = kept(25)
    found = asked.last(*[after] * 10)
    assert (found.args if found else None) == again


@pytest.mark.parametrize(
    ("micro", "part", "after"), [(1, 0.4, 2), (4, 0.6, 5), (32, 0.7, 38), (1, 0.5, None), (32, 0.75, None)]
)
def test_room_left_advises_a_size_whose_predicted_peak_fits(micro: int, part: float, after: int | None) -> None:
    asked = Asked("micro-batch", micro)
    asked.memory.kept = {"barred 0": 64.0, "until 0": 0.0, "shrunk b": float(micro), "use b": 0.95}
    found = asked.last(*[part] * 10)
    assert (found.args if found else None) == (verbs.ResizeBatch(micro=after) if after else None)
    assert found is None or found.advise_only


def test_bounds_hold_and_up_may_be_on_or_off() -> None:
    larger = Asked("micro-batch", up="on").last(*[0.5] * 10)
    assert larger is not None and not larger.advise_only
    assert Asked("micro-batch", up="off").last(*[0.5] * 10) is None
    assert Asked("micro-batch").last(*[0.02] * 10) is None, "it was never larger"
    assert Asked("micro-batch", 32, most=32, up="on").last(*[0.5] * 10) is None
    assert Asked("micro-batch", 64, up="on").last(*[0.3] * 10) is None, "a micro-batch isn't larger than the share"
    found = Asked("micro-batch", 32, least=30).last(*[0.95] * 10)
    assert found is not None and found.args == verbs.ResizeBatch(micro=30)


CURVE = PassCurve(tuple((micro, micro / rate) for micro, rate in ((1, 50), (4, 80), (16, 100), (32, 101), (64, 90))))
"""It rises by a quarter from 4 to 16 samples, and by one in a hundred after that."""


def by_curve(micro: int, use: float, memory: MemoryModel | None = None, **settings: Any) -> Proposal | None:
    """Return what is proposed after a step that took this part of the cap at its peak."""
    asked = Asked("micro-batch", micro, window=1, **settings)
    asked.step = 1
    values = {"memory_peak_bytes": use * 1e9, "memory_cap_bytes": 1e9}
    reports = {rank: report(rank, asked.step, values=values) for rank in (0, 1)}
    models, peaks = (dict.fromkeys(reports, found) for found in (StepModel(CURVE), memory))
    stepped = Stepped(asked.plan, reports, lambda: models, lambda: peaks if memory else {})
    found = asked.policy.propose(asked.facts(stepped), asked.memory)
    assert not isinstance(found, Finding)
    return found


@pytest.mark.parametrize(
    ("micro", "use", "memory", "after"),
    [
        (4, 0.1, None, 32),  # of a share of 64: two passes
        (16, 0.1, None, None),  # 1 % faster is too little
        (4, 0.4, None, 8),  # no more than the peak in proportion allows
        (4, 0.4, MemoryModel(3.6e8, 1e7), 32),  # the model knows that most of it is there anyway
        (4, 0.4, MemoryModel(2e8, 5e7), 13),
    ],
)
def test_where_the_curve_is_known_it_goes_to_what_is_faster_and_fits(micro, use, memory, after):
    found = by_curve(micro, use, memory)
    assert (found.args if found else None) == (verbs.ResizeBatch(micro=after) if after else None)
    assert found is None or found.advise_only
    assert by_curve(micro, use, memory, up="off") is None


@pytest.mark.parametrize("use", [0.1, 0.8])
def test_past_the_peak_of_the_curve_it_goes_down_to_it(use: float) -> None:
    """64 samples are 12 % slower than 32, whatever memory is left; what is 1 % faster stays."""
    found = by_curve(64, use, up="off")
    assert found is not None and found.args == verbs.ResizeBatch(micro=32) and not found.advise_only
    assert "12 % faster than of 64" in found.reason
    assert by_curve(64, use, least=40) is None, "40 and the rest of 24 are too little faster"
    assert by_curve(32, 0.8) is None


@pytest.mark.parametrize("death", [False, True])
def test_a_size_that_ran_out_of_memory_is_barred_for_its_steps_and_over_generations(death: bool) -> None:
    asked = Asked("micro-batch", 33, barred_steps=50)
    assert asked.last(*[0.8] * 3) is None
    failed = MemoryDeath(0, "killed", 33) if death else Replayed(asked.plan, report(0, 3, replays=1, micro_batch=16))
    assert asked.policy.propose(asked.facts(failed), asked.memory) is None
    asked.kept, asked.memory.evidence = kept(31), {}
    sizes = {found.args for found in asked.used(*[0.5] * 49) if isinstance(found, Proposal)}
    assert sizes == {verbs.ResizeBatch(micro=32)}
    sizes = {found.args for found in asked.used(*[0.5] * 11) if isinstance(found, Proposal)}
    assert sizes == {verbs.ResizeBatch(micro=37)}


@pytest.mark.parametrize(("shares", "after"), [((60, 68), 25), ((25, 103), 25), ((24, 104), None), ((3, 125), None)])
def test_of_several_ranks_of_a_node_the_fullest_decides_unless_a_share_is_too_small(shares, after):
    asked = Asked("micro-batch")
    ranks = {rank: RankSetting("a", share, 32) for rank, share in enumerate(shares)}
    asked.kept = msgspec.structs.replace(asked.kept, settings=Settings(1, 128, ranks))
    found = None
    for asked.step in range(1, 11):
        uses = {rank: {"memory_peak_bytes": use, "memory_cap_bytes": 1.0} for rank, use in enumerate((0.2, 0.95))}
        reports = {rank: report(rank, asked.step, values=values) for rank, values in uses.items()}
        found = asked.policy.propose(asked.facts(Stepped(asked.plan, reports)), asked.memory)
    assert not isinstance(found, Finding)
    assert (found.args if found else None) == (verbs.ResizeBatch(micro=after) if after else None)


def test_peaks_of_another_size_are_no_evidence() -> None:
    asked = Asked("micro-batch")
    assert not any(asked.used(*[0.95] * 9))
    asked.kept = kept(16)
    assert not any(asked.used(*[0.95] * 9))
    assert any(asked.used(0.95))


class Searching(Asked):
    """A run whose file leaves the micro-batch open, and whose nodes have no profile."""

    def __init__(self, rates: dict[int, float], bytes_per_sample: float = 1.0, **settings: Any) -> None:
        super().__init__("micro-batch", micro=2, **settings)
        self.rates, self.bytes_per_sample = rates, bytes_per_sample
        self.left_open(auto_micro=True)

    def left_open(self, **changes: Any) -> None:
        ranks = {rank: msgspec.structs.replace(of, **changes) for rank, of in self.kept.settings.ranks.items()}
        self.kept = msgspec.structs.replace(
            self.kept, settings=msgspec.structs.replace(self.kept.settings, ranks=ranks)
        )

    def sizes(self, steps: int) -> list[int]:
        """The first rank's micro-batch in each step."""
        found = []
        for _ in range(steps):
            micro = self.kept.settings.ranks[0].micro_in_force
            found.append(micro)
            busy = m.Phases(0.0, 64 / self.rates.get(micro, micro), 0.0, 0.0, 0.0, 0.0)
            values = {"memory_peak_bytes": micro * self.bytes_per_sample, "memory_cap_bytes": 100.0}
            proposal = self.stepped(phases=busy, own_samples=64, own_tokens=6400, micro_batch=micro, values=values)
            if isinstance(proposal, Proposal) and proposal.edit is not None:
                self.kept = msgspec.structs.replace(self.kept, settings=proposal.edit.settings)
        return found


RISING = {2: 10.0, 4: 18.0, 8: 30.0, 16: 25.0, 32: 20.0}


def test_the_first_steps_look_for_the_fastest_micro_batch_and_return_to_it():
    sizes = Searching(RISING).sizes(40)
    assert [*dict.fromkeys(sizes)] == [2, 4, 8, 16]
    assert set(sizes[-16:]) == {8} and sizes.index(16) <= 20


def test_the_search_stays_within_memory_and_ends():
    sizes = Searching({}, bytes_per_sample=12.0).sizes(40)
    assert max(sizes) * 12.0 <= 85.0
    assert len({*sizes[-20:]}) == 1


@pytest.mark.parametrize("changes", [{"auto_micro": False}, {"halved_to": 2}])
def test_a_micro_batch_that_was_decided_is_not_searched(changes):
    asked = Searching(RISING)
    asked.left_open(**changes)
    assert {*asked.sizes(20)} == {2}


def test_a_policy_that_only_advises_searches_nothing():
    assert {*Searching(RISING, mode="advise").sizes(20)} == {2}
