"""What a trainer's log says of its groups."""

import logging

import pytest

from trainctl.protocol import messages as m
from trainctl.trainer.common import logs


@pytest.mark.parametrize(
    ("ranks", "engine", "says"),
    [((0,), "none", "ready alone (g1.1)"), ((0, 1), "ring", "joined g1.1: 2 ranks with ring in 0.25 s")],
)
def test_a_group_is_told_in_words(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[int, ...],
    engine: m.Engine,
    says: str,
) -> None:
    monkeypatch.setattr(logs.log, "propagate", True)
    order = m.Form(run="r", generation=m.Generation(1, 1), engine=engine, ranks=ranks)
    outcome = m.Formed(run="r", rank=0, generation=m.Generation(1, 1), join_seconds=0.25, level_seconds=0.0)
    with caplog.at_level(logging.INFO, logger=logs.log.name):
        logs.concluded(order, outcome)
    assert caplog.messages == [says]
