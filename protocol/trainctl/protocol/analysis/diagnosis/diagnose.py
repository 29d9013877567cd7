"""Asks each rule in order what it finds in a run."""

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.run_facts import RunFacts


def diagnose(facts: RunFacts) -> m.Diagnosis:
    """What is wrong with a run, the cause of other findings before these. It never raises for facts that are missing:
    what can't be judged is `unknown`."""
    last = facts.steps[-1] if facts.steps else None
    first = facts.steps[0].step if facts.steps else 0
    return m.Diagnosis(at=facts.at, step=last.step if last else 0, first_step=first, step_seconds=None)
