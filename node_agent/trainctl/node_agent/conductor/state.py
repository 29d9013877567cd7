"""The conductor's state: what it must not forget, how far the run has come, and what it has just decided."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.pending import SIDE_KINDS
from trainctl.node_agent.conductor.rows import RunSums, step_committed
from trainctl.node_agent.planning.durable import Carried, Durable, Settings
from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages.events import AnyEvent

Stage = Literal["loading", "fencing", "offering", "forming", "formed", "leaving", "over"]


class CannotGoOnError(Exception):
    """The run fails; the text is why, in one line."""


class NobodyLeftError(CannotGoOnError):
    """No rank has the state of the record's last step: the run may continue from a checkpoint."""


@dataclasses.dataclass
class Progress:
    """What was committed: the last step, the first position after it, and sums over all steps."""

    step: int = 0
    cursor: int = 0
    totals: RunSums = RunSums()  # noqa: RUF009  immutable
    before: RunSums = RunSums()  # noqa: RUF009  immutable; without the last step
    loss: float | None = None  # of the last step

    def commit(self, plan: m.StepPlan, report: m.Report) -> m.StepCommitted:
        """Move on to the step of `plan`, which `report` commits."""
        self.step, self.cursor = report.step, plan.cursor + plan.global_batch
        self.before, self.totals = self.totals, self.totals.after(report)
        row = step_committed(report, plan, self.cursor, self.totals)
        self.loss = row.loss
        return row


class ConductorState:
    """Shared by the parts of one conductor and written by no one else; pure."""

    def __init__(self, run: str, config: RunFile, durable: Durable, progress: Progress) -> None:
        self.run, self.config = run, config
        self.durable, self.progress = durable, progress
        self.stage: Stage = "loading"
        self.lacking = ""  # what is missing for steps to be made at all, empty if nothing
        self.waiting = ""  # for what data the next step is held back, empty if for none
        self._decisions: list[d.Decision] = []
        self.ends: list[d.CommandEnded] = []  # outcomes of commands among what has just been decided

    @property
    def settings(self) -> Settings:
        return self.durable.settings

    def node(self, rank: int) -> str:
        return self.durable.settings.ranks[rank].node

    def nodes(self, ranks: Iterable[int]) -> str:
        """The ranks' nodes as a list in words, each once."""
        return ", ".join(dict.fromkeys(self.node(rank) for rank in ranks))

    def take(self) -> list[d.Decision]:
        """Hand out what was decided since the last time, in order."""
        if not self._decisions:
            return []
        taken, self._decisions = self._decisions, []
        self.ends.clear()
        return taken

    def decide(self, decision: d.Decision) -> None:
        self._decisions.append(decision)

    def keep(self, **changes: Any) -> None:
        """Change the durable state; a Persist or Issue decision says when it is journaled."""
        self.durable = msgspec.structs.replace(self.durable, **changes)

    def persist(self, **changes: Any) -> None:
        """Change the durable state and have it journaled."""
        self.keep(**changes)
        self.decide(d.Persist(self.durable))

    def happen(
        self, data: AnyEvent, severity: m.Severity = "info", step: int | None = None, by: str = "auto",
        verb: str | None = None, command: str | None = None,
    ) -> None:  # fmt: skip
        """For the run's events; at the last step unless one is given. `verb`: of a command that would have done it.
        `command`: the ID of the one that did it."""
        self.decide(d.Happened(data, severity, by, self.progress.step if step is None else step, verb, command))

    def carry(self, command: d.Commanded, step: int, made: AnyEvent | None = None) -> None:
        """The plan of `step` carries the command: it is applied when that step commits, and has then `made` that."""
        carried = Carried(command.verb, command.by, step, self.settings.plan_version, command.node, made)
        self.keep(carried={**self.durable.carried, command.id: carried})

    def uncarry(self, id: str) -> None:
        self.keep(carried={key: value for key, value in self.durable.carried.items() if key != id})

    def conclude(self, step: int) -> None:
        """Commands whose step has been committed (or journaled, while paused) are applied; side plans end their own."""
        for id, carried in list(self.durable.carried.items()):
            if carried.step <= step and carried.verb not in SIDE_KINDS:
                self.end(id, "applied", carried.step, made=carried.made)

    def end(
        self, id: str, state: Literal["applied", "rejected", "expired", "failed"], step: int | None = None,
        reason: str = "", field: str | None = None, made: AnyEvent | None = None,
    ) -> None:  # fmt: skip
        """A command's outcome, final."""
        known = self.durable.carried.get(id)
        version = known.plan_version if known is not None else self.durable.settings.plan_version
        self.uncarry(id)
        self.ends.append(d.CommandEnded(id, state, step, reason, field, made, version))
        self.decide(self.ends[-1])
