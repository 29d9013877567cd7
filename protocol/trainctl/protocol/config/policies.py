"""Policies: what a run decides by itself, and what a run file may set of each."""

import dataclasses
from typing import Final, Literal

import msgspec

PolicyName = Literal["out-of-memory", "replays", "first-shares"]
PolicyMode = Literal["off", "advise", "on"]
"""Off: nothing. Advise: an event names the command that would do it. On: it is done."""
AUTHOR: Final = "auto:"
"""Who does what a policy decides: this and the policy's name."""


@dataclasses.dataclass(frozen=True)
class PolicyEntry:
    """What a policy does, and how it begins."""

    default: PolicyMode
    summary: str
    yields_to: tuple[str, ...] = ()
    """Verbs by which a person decides instead: from then on the policy only advises."""


POLICIES: Final[dict[PolicyName, PolicyEntry]] = {
    "out-of-memory": PolicyEntry("on", "a trainer that died of lack of memory comes back with half its micro-batch"),
    "replays": PolicyEntry("on", "a rank that ran a micro-batch again in smaller pieces keeps that size"),
    "first-shares": PolicyEntry("on", "a new run's open shares follow a short measurement", ("rebalance",)),
}
"""Every policy there is. Only those that leave the loss curve alone are on by default."""


class PolicyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[policy.NAME]` of a run file."""

    mode: PolicyMode
