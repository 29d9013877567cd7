"""The alerts of an attached run, by what its program reports."""

import math

from trainctl.node_agent.alerts.evaluator import Cleared, GuestAlerts, Raised
from trainctl.node_agent.guests import guest_rows
from trainctl.protocol import messages as m

VIEW = guest_rows.view_of(
    m.AttachRun(rid="r", run="mine", name="ppo", started_at=0.0, ranks=(m.GuestRank(0),)), "box", "/runs/mine",
    m.Generation(1, 1), 0,
)  # fmt: skip


def step(number: int, loss: float) -> m.StepCommitted:
    made = m.GuestStep(step=number, committed_at=float(number), step_seconds=1.0, loss=loss)
    return guest_rows.committed(VIEW, made, None)[0]


def test_a_loss_that_is_no_number_is_told_of_until_it_is_one_again() -> None:
    alerts = GuestAlerts(VIEW, 0.0)
    alerts.heard(step(1, math.nan), 1.0)
    (raised,) = alerts.look(VIEW, 1.0, 1.0)
    assert isinstance(raised, Raised) and raised.alert.id == "nonfinite:mine"
    assert raised.alert.text.startswith("ppo: loss is nan at step 1")
    assert alerts.acknowledge("nonfinite:mine", "anna") and not alerts.acknowledge("nonfinite", "anna")
    assert [alert.acknowledged_by for alert in alerts.open] == ["anna"]
    changes = []
    for number in range(2, 60):
        alerts.heard(step(number, 1.0), float(number))
        changes += alerts.look(VIEW, float(number), float(number))
    assert [type(change) for change in changes] == [Cleared] and alerts.open == ()


def test_silence_is_told_of_and_a_long_step_isnt() -> None:
    alerts = GuestAlerts(VIEW, 0.0)
    assert alerts.look(VIEW, 100_000.0, 1.0) == []
    silent = guest_rows.silent(VIEW, 31.0, 1.0)
    changes = [change for at in range(60) for change in alerts.look(silent, 100_000.0 + at, 1.0)]
    assert [change.alert.id for change in changes] == ["node-lost:box:0:mine"]
    assert "its program has been silent for 31 s" in changes[0].alert.text
