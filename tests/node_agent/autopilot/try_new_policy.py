"""Run by test_new_policy with the patch applied: the new policy in run file, verb, screens, and a journaled run."""

import sys
from pathlib import Path

from tests.node_agent.support.journaled import JournaledAgent

from trainctl.protocol import messages as m
from trainctl.protocol.config import policies, run_file
from trainctl.protocol.messages import verbs
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.commands import forms
from trainctl.tui.state.view_state import ViewState

NAME = "even-shares"
FILE = {
    "run": {"name": "r", "steps": 10}, "model": {"path": "m"}, "data": {"path": "d"}, "batch": {"global": 8},
    "optimizer": {"learning_rate": 1e-3}, "policy": {NAME: {"mode": "off"}},
}  # fmt: skip


def command(number: int, verb: str, **args: object) -> m.Command:
    return m.Command(rid="r", id=f"{number:08d}-0000-0000-0000-000000000000", verb=verb, args=args, by="anna")


def events(agent: JournaledAgent) -> list[m.Event]:
    with RecordReader(agent.paths) as reader:
        return list(reader.events(0, 500)[0])


def check_declared() -> None:
    """Run file, verb, dialog and schema know it."""
    assert run_file.parse(FILE).policy.of(NAME).mode == "off"
    verbs.check("autopilot", {"name": NAME, "mode": "on"})
    (name, _) = forms.form("autopilot", ViewState()).fields
    assert NAME in name.choices


def check_run(folder: Path) -> None:
    """It advises at first; when it is on its command is journaled and applied at one step."""
    agent = JournaledAgent(folder, 2, seed=1)
    agent.take(command(1, "rebalance", shares={"a": 9, "b": 3}))
    agent.until(lambda: any(event.by == f"auto:{NAME}" for event in events(agent)))
    (advice,) = [event for event in events(agent) if event.by == f"auto:{NAME}"]
    assert advice.text == f"policy {NAME}: advises rebalance a=6 b=6 (uneven for 3 steps)", advice.text
    agent.take(command(2, "autopilot", name=NAME, mode="on"))
    agent.until(lambda: [of.share for of in agent.session.conductor.durable.settings.live.values()] == [6, 6])
    agent.until(lambda: not agent.db.open_commands())
    agent.go_on(200)
    done = [event for event in events(agent) if event.by == f"auto:{NAME}" and event.outcome is not None]
    (applied,) = [event for event in done if event.outcome == "applied"]
    assert applied.text == "rebalanced: a 9 → 6, b 3 → 6 (uneven for 3 steps)", applied.text
    assert applied.step is not None and applied.step in agent.planned_steps(applied.command)
    agent.close()


check_declared()
check_run(Path(sys.argv[1]))
assert NAME in policies.POLICIES
print("done")
