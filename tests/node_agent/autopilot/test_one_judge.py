"""Alerts, policies and diagnosis find the same faults of a curve at the same steps, by the limits of one run file."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.alert_world import GENERATION, RUN
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import config, durable
from tests.protocol.support import planted_curves as planted

from trainctl.node_agent.alerts.evaluator import Cleared, Evaluator
from trainctl.node_agent.autopilot.policy import Stepped
from trainctl.node_agent.conductor import events as conductor_events
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.state import ConductorState, Progress
from trainctl.node_agent.planning import plans
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.curve import CurveLimits
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages.events import PolicyAdvised

ALERTS = {"loss-spike": "unstable", "divergence": "unstable", "nonfinite": "not-finite", "clip": "clip-bound"}
"""Kinds of alerts, and the cause that a diagnosis names for each."""


def committed(curve: Sequence[tuple[float, float]], **values: float) -> list[m.StepCommitted]:
    return [
        m.StepCommitted(
            run=RUN,
            generation=GENERATION,
            step=step,
            committed_at=step,
            loss=loss,
            weight=3,
            samples=12,
            learning_rate=1e-3,
            grad_norm=norm,
            cursor=12 * step,
            global_batch=12,
            plan_version=1,
            step_seconds=1.0,
            tokens_total=0,
            values=values,
        )
        for step, (loss, norm) in enumerate(curve, 1)
    ]


def alerted(run: RunFile, steps: Sequence[m.StepCommitted]) -> tuple[str, int]:
    """Return the first alert and its step."""
    evaluator = Evaluator(run.alerts, 0.0, limits=CurveLimits.of(run))
    for step in steps:
        evaluator.heard(step, float(step.step))
        for change in evaluator.turned(float(step.step), float(step.step)):
            return change.alert.kind, step.step
    raise AssertionError("no alert")


def diagnosed(run: RunFile, steps: Sequence[m.StepCommitted]) -> list[str]:
    """Return the causes that a diagnosis finds at the last of these steps."""
    return [finding.cause for finding in diagnose(DiagnosisFacts(at=steps[-1].step, steps=steps, config=run)).findings]


def advised(run: RunFile, steps: Sequence[m.StepCommitted]) -> tuple[str, int] | None:
    """Return the first policy that advises or acts, and the step."""
    kept = msgspec.structs.replace(durable(("a", "b"), 12), checkpoints=(250,))
    state = ConductorState("sim", run, kept, Progress())
    proposals = Proposals(state)
    for step in steps:
        plan = plans.PlanMaker("sim", state.durable, run, step.step, 0).train()
        own = report(step=step.step, loss_sum=3 * (step.loss or 0.0), weight=3.0, grad_norm=step.grad_norm)
        state.progress.commit(plan, own)
        proposals.ask(Stepped(plan, {0: own}))
        for decided in state.take():
            if isinstance(decided, conductor_events.Happened) and isinstance(decided.data, PolicyAdvised):
                return decided.data.name, step.step
    return None


@pytest.mark.parametrize("tables", [{}, {"alerts": {"loss_spike_steps": 5}}, {"policy": {"spike": {"steps": 5}}}])
def test_a_spike_is_one_finding_for_all_three(tables: dict[str, Any]) -> None:
    """Either table sets the limit of all; the policy waits for the loss to come back."""
    run, steps = config(100_000, 12, **tables), committed(planted.spiked(1, back_after=None))
    kind, at = alerted(run, steps)
    count = 5 if tables else 3
    assert (kind, at) == ("loss-spike", planted.FAULT_STEP + count - 1)
    assert diagnosed(run, steps[: at - 1]) == []
    assert diagnosed(run, steps[:at]) == [ALERTS[kind]]
    assert advised(run, steps) == ("spike", planted.FAULT_STEP + 50)


@pytest.mark.parametrize(
    "tables", [{}, {"alerts": {"diverged_mads": 12.0}}, {"policy": {"divergence": {"mads": 12.0}}}]
)
def test_a_rising_loss_is_one_finding_for_all_three(tables: dict[str, Any]) -> None:
    run, steps = config(100_000, 12, **tables), committed(planted.diverged(1))
    kind, at = alerted(run, steps)
    assert kind == "divergence"
    assert diagnosed(run, steps[: at - 1]) == []
    assert diagnosed(run, steps[:at]) == [ALERTS[kind]]
    assert advised(run, steps) == ("divergence", at)


def test_a_jump_of_the_loss_alone_is_shown_and_alerts_and_no_policy_goes_back_for_it() -> None:
    both = zip(planted.spiked(1, back_after=None), planted.healthy(1), strict=True)
    run, steps = config(100_000, 12), committed([(loss, norm) for (loss, _), (_, norm) in both])
    kind, at = alerted(run, steps)
    assert kind == "loss-spike" and diagnosed(run, steps[:at]) == [ALERTS[kind]]
    assert advised(run, steps[: planted.FAULT_STEP + 100]) is None


def test_clipping_is_one_finding_for_alerts_and_diagnosis() -> None:
    run, steps = config(100_000, 12), committed(planted.healthy(1, 300), clip_scale=0.002)
    kind, at = alerted(run, steps)
    assert (kind, at) == ("clip", 100)
    assert ALERTS[kind] in diagnosed(run, steps[:at]) and ALERTS[kind] not in diagnosed(run, steps[: at - 1])


SHOWN = m.Finding("spike", "loss 9 at step 3", "error")
SOLVED = msgspec.structs.replace(SHOWN, remedies=(m.Remedy("", "rollback step=1", "rollback"),))


@pytest.mark.parametrize(
    ("mode", "shown", "solved"),
    [("off", "show", "show"), ("alert", "alert", "alert"), ("advise", "advise", "advise"), ("on", "advise", "act")],
)
def test_the_mode_decides_what_happens_about_a_finding(mode: m.Mode, shown: m.Reaction, solved: m.Reaction) -> None:
    assert (SHOWN.reaction(mode), SOLVED.reaction(mode)) == (shown, solved)


def test_a_kind_that_is_off_is_only_shown_and_ends_the_alert_of_the_agent_before() -> None:
    run, steps = config(100_000, 12, alerts={"off": ["clip"]}), committed(planted.healthy(1, 200), clip_scale=0.002)
    before = Evaluator(config(100_000, 12).alerts, 0.0)
    for step in steps[:120]:
        before.heard(step, float(step.step))
        before.turned(float(step.step), 0.0)
    evaluator = Evaluator(run.alerts, 120.0, before.open.values())
    (change,) = evaluator.turned(120.0, 0.0)
    assert isinstance(change, Cleared) and change.alert.kind == "clip"
    for step in steps[120:]:
        evaluator.heard(step, float(step.step))
        assert not evaluator.turned(float(step.step), 0.0)
    assert "clip-bound" in diagnosed(run, steps)
