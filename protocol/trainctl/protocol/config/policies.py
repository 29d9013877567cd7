"""Policies: what a run decides by itself, and what a run file may set of each."""

import dataclasses
from typing import ClassVar, Final, Literal

import msgspec

PolicyName = Literal["out-of-memory", "replays", "first-shares"]
PolicyMode = Literal["off", "advise", "on"]
"""Off: it does nothing. Advise: an event names the command that it would send. On: it sends the command."""
AUTHOR: Final = "auto:"
"""Author of a policy's commands: this and the policy's name."""


@dataclasses.dataclass(frozen=True)
class PolicyEntry:
    """What a policy does, and how it begins."""

    default: PolicyMode
    summary: str
    yields_to: tuple[str, ...] = ()
    """Verbs by which a person decides instead; from then on the policy only advises."""


POLICIES: Final[dict[PolicyName, PolicyEntry]] = {
    "out-of-memory": PolicyEntry("on", "a trainer that ran out of memory restarts with half its micro-batch"),
    "replays": PolicyEntry("on", "a rank that had to split a micro-batch keeps the smaller size"),
    "first-shares": PolicyEntry("on", "a short measurement sets the shares that the run file doesn't", ("rebalance",)),
}
"""Every policy. Only those that don't affect the loss curve are on by default."""


class PolicyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[policy.NAME]` of a run file. A policy with settings of its own has a type derived from this."""

    mode: PolicyMode | None = None  # None: the policy's default


class PolicyTables(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="kebab"
):
    """`[policy]` of a run file: a table for each policy, under its name."""

    keys_are_names: ClassVar[bool] = True
    out_of_memory: PolicyTable = PolicyTable()
    replays: PolicyTable = PolicyTable()
    first_shares: PolicyTable = PolicyTable()

    def of(self, name: PolicyName) -> PolicyTable:
        """The table of a policy."""
        table: PolicyTable = getattr(self, name.replace("-", "_"))
        return table
