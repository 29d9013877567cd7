"""Events of runs that other nodes led wait until those nodes have taken them, also over a restart."""

from pathlib import Path

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.records.late_events import MOST, LateEvents
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import RunBranched


def branched(branch: str) -> m.LateEvent:
    return m.LateEvent("run-1", 1005.5, "anna", "info", 6, RunBranched("run-1", 6, branch, "forge"))


def test_each_lead_is_sent_its_own_until_it_has_taken_them(tmp_path: Path) -> None:
    with AgentDb(tmp_path / "agent.db") as db:
        waiting = LateEvents(db)
        for lead, branch in (("studio", "run-2"), ("studio", "run-3"), ("mbp", "run-4")):
            waiting.add(lead, branched(branch))
        assert waiting.for_lead("studio") == waiting.for_lead("studio") == (branched("run-2"), branched("run-3"))
        waiting.remove("studio", ["run-2", "run-4"])
        assert waiting.for_lead("studio") == (branched("run-3"),)
    with AgentDb(tmp_path / "agent.db") as db:
        waiting = LateEvents(db)
        assert waiting.for_lead("studio") == (branched("run-3"),)
        assert waiting.for_lead("mbp") == (branched("run-4"),), "only its own lead takes it"


def test_an_answer_has_the_oldest_of_many(tmp_path: Path) -> None:
    with AgentDb(tmp_path / "agent.db") as db:
        waiting = LateEvents(db)
        for number in range(MOST + 2):
            waiting.add("studio", branched(f"run-{number}"))
        assert [event.data.branch for event in waiting.for_lead("studio")] == [f"run-{n}" for n in range(MOST)]
        waiting.remove("studio", ["run-0", "run-1"])
        assert waiting.for_lead("studio")[-1] == branched(f"run-{MOST + 1}")
        db.late_events = '[{"lead": "studio", "event": {"run": 1}}]'  # of a later version
        assert LateEvents(db).for_lead("studio") == ()
