"""Stages of a conductor, from loading to the end of the run, and what each asks of the ranks."""

import dataclasses
from typing import Literal

from trainctl.protocol.messages import Fenced, Preflight, Ready, Sealed

Stage = Literal["loading", "fencing", "offering", "forming", "formed", "leaving", "over"]
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


@dataclasses.dataclass
class Rank:
    """Messages of a rank in this life of the conductor."""

    ready: Ready | None = None
    formed: bool = False
    fenced: Fenced | None = None
    endpoints: tuple[str, ...] | None = None
    ended: bool = False
    why: str = ""  # of its end
    heard: float | None = None  # when it last said something
    doing: str = ""  # what it was at then
    loading: str = ""  # how far that has come, while it loads
    sealed: Sealed | None = None  # what it has of a growing file
    preflight: Preflight | None = None  # of its first start

    def forget(self) -> None:
        """It is lost: what it said counts no more."""
        self.ready = self.fenced = self.endpoints = self.sealed = self.preflight = None
        self.formed = False

    def owes(self, stage: Stage) -> bool:
        """Return whether the answer to what a stage asks is still to come."""
        if stage == "forming":
            return not self.formed
        return {"loading": self.ready, "fencing": self.fenced, "offering": self.endpoints}.get(stage, ()) is None
