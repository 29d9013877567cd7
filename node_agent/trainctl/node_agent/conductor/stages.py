"""Stages of a conductor: from loading to the end of the run. `enter` is all that changes one."""

from math import inf

from trainctl.node_agent.conductor.state import ConductorState, Stage

FENCE_SECONDS = 10.0
"""Seconds for answering a fence, which a rank does at once unless it is in an update."""
OFFER_SECONDS = 20.0
"""Seconds for opening endpoints, which a rank does at once."""
JOIN_SECONDS = 30.0
"""Seconds for joining, before any state is sent; a rank keeps this deadline itself."""
GRACE_SECONDS = 10.0
"""Seconds beyond a deadline that the ranks keep themselves, for the answer to arrive."""
_ENDS: dict[Stage, str] = {"leaving": "the run has finished, failed, was stopped, or goes back to a checkpoint"}
_BREAKS: dict[Stage, str] = {"fencing": "a rank is gone, late or back, or its group failed"}
TRANSITIONS: dict[Stage, dict[Stage, str]] = {
    "loading": {
        "fencing": "all ranks are there, and stand in a generation of another conductor",
        "offering": "all ranks have loaded",
        "forming": "the only rank has loaded",
        **_ENDS,
    },
    "fencing": {
        "offering": "all ranks have left the generation",
        "forming": "the only rank has left the generation",
        **_BREAKS,
        **_ENDS,
    },
    "offering": {"forming": "all ranks have opened endpoints", **_BREAKS, **_ENDS},
    "forming": {"formed": "all ranks have joined", **_BREAKS, **_ENDS},
    "formed": {
        "offering": "the run resumes, or has other ranks from the next step on",
        "forming": "the run resumes, or has one rank from the next step on",
        **_BREAKS,
        **_ENDS,
    },
    "leaving": {"over": "no rank is left"},
    "over": {},
}
"""Why a stage may be entered, by the stage before it."""


def enter(state: ConductorState, stage: Stage, seconds: float = inf) -> None:
    """Change the stage; what it asks of the ranks is overdue after `seconds`. Raises ValueError for a stage that
    can't follow."""
    if stage not in TRANSITIONS[state.stage]:
        raise ValueError(f"a conductor can't go from {state.stage} to {stage}")
    state.stage = stage
    state.due = state.now + seconds
