"""Tests of what the exit statuses of a spot notice command change."""

import logging

import pytest

from trainctl.node_agent.alerts.hooks import Outcome
from trainctl.node_agent.roles.drains import NodeDrain
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.services.supervision import SPOT_NOTICE as WHY
from trainctl.node_agent.services.supervision import SpotNotice

KILLED = Outcome(None, "notice took longer than 10 s and was killed")


@pytest.mark.parametrize(
    ("statuses", "leaving"),
    [
        ((), ""), ((1, 1, 1), ""), ((None,), ""), ((0,), WHY), ((0, 1, 1), WHY), ((0, 1, 1, 0, 1, 1), WHY),
        ((0, None, None, None, None), WHY), ((0, 1, 22, 127), ""), ((0, 1, None, 1, None, 1), ""),
        ((0, 1, 1, 1, 0), WHY),
    ],
)  # fmt: skip
def test_a_notice_is_withdrawn_only_by_three_other_statuses_in_a_row(statuses, leaving):
    role = AgentRole()
    notice = SpotNotice(("notice",), NodeDrain(role, 15.0, lambda: False))
    for status in statuses:
        notice.take(Outcome(status, "") if status is not None else KILLED)
    assert role.leaving == leaving


def test_the_first_problem_is_logged_once(caplog: pytest.LogCaptureFixture):
    notice = SpotNotice(("notice",), NodeDrain(AgentRole(), 15.0, lambda: False))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            notice.take(KILLED)
    assert [record.getMessage() for record in caplog.records] == [f"spot notice: {KILLED.problem}"]
