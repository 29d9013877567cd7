"""The effects of the commands that plans carry, folded one by one beside the agent, and whether each plan is that."""

import dataclasses
import json
import math
import sqlite3
from collections import Counter, deque
from contextlib import closing
from typing import Any, Self

import pytest
from tests.cluster.run_files import NODES
from tests.cluster.waits import Nodes, plans_of

from trainctl.protocol import messages as m
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.messages.events import GenerationFormed, SharesChanged
from trainctl.protocol.record.reader import RecordReader

EDITS = ("resize-batch", "rebalance", "set-lr", "set-global-batch", "drain", "admit")


@dataclasses.dataclass(frozen=True)
class Applied:
    """A command as the lead's ledger has it."""

    verb: str
    args: dict[str, Any]
    node: str | None
    step: int
    before: str
    after: str


@dataclasses.dataclass
class State:
    """All that commands edit. Begins as the run file has it; a node that is out has no share."""

    config: dict[str, Any]
    shares: dict[str, int]
    micro: dict[str, int]  # as wanted; in force as far as the share goes
    global_batch: int
    rate: float = 1.0  # of the schedule, or the learning rate itself
    is_constant: bool = False

    @classmethod
    def of_start(cls, config: dict[str, Any]) -> Self:
        """Return the state of a run over all nodes, with even shares where none are given."""
        total, tables = config["batch"]["global"], config["nodes"]
        given = {node: tables[node].get("share", total // len(tables)) for node in NODES}
        micro = {node: tables[node].get("micro", config["batch"]["micro"]) for node in NODES}
        return cls(config, given, micro, total)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to a tenth of the peak."""
        if self.is_constant:
            return self.rate
        optimizer, steps = self.config["optimizer"], self.config["run"]["steps"]
        warmup, peak = optimizer["warmup_steps"], optimizer["learning_rate"]
        if step <= warmup:
            return self.rate * peak * step / warmup
        progress = (step - warmup) / (steps - warmup)
        return self.rate * peak * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)

    def take(self, edit: Applied) -> None:
        match edit.verb:
            case "resize-batch":
                for node in (edit.node,) if edit.node else self.live:
                    self.micro[node] = edit.args["micro"]
            case "set-lr":
                self._set_rate(edit)
            case "set-global-batch":
                self._set_global_batch(edit)
            case "rebalance" | "drain" | "admit":
                self._set_shares(edit)

    @property
    def live(self) -> list[str]:
        return [node for node in NODES if self.shares[node]]

    def _set_rate(self, edit: Applied) -> None:
        if edit.args["schedule"] == "set":
            self.rate, self.is_constant = edit.args["value"], True
        else:
            self.rate *= edit.args["value"] / self.learning_rate(edit.step)

    def _set_global_batch(self, edit: Applied) -> None:
        wanted = edit.args["value"]
        if edit.args.get("schedule") == "scale":
            self.rate *= wanted / self.global_batch
        self.global_batch = wanted
        of_live = {NODES.index(node): float(self.shares[node]) for node in self.live}
        self._deal({NODES[rank]: count for rank, count in apportion(wanted, of_live).items()})

    def _set_shares(self, edit: Applied) -> None:
        """Take over the shares that the ledger says came of it; they must start from here and be what was asked for."""
        before, after = _counts(edit.before), _counts(edit.after)
        assert before == {node: self.shares[node] for node in before}, edit
        assert set(before) == set(after) == {*self.live, *([edit.node] if edit.verb == "admit" else [])}, edit
        assert sum(after.values()) == self.global_batch, edit
        for node, count in edit.args.get("shares", {}).items():
            percent = isinstance(count, str)
            wanted = float(count.removesuffix("%")) / 100 * self.global_batch if percent else count
            assert abs(after[node] - wanted) < (1 if percent else 1e-9), edit
        assert [node for node, count in after.items() if not count] == [edit.node] * (edit.verb == "drain"), edit
        self._deal(after)

    def _deal(self, counts: dict[str, int]) -> None:
        for node, count in counts.items():
            self.shares[node] = count

    def catch_up(self, losses: "deque[dict[str, int]]", wanted: dict[str, int]) -> None:
        """Take up what losses and returns made of the shares, as far as it takes to have those `wanted`."""
        while losses and any(self.shares[node] != count for node, count in wanted.items()):
            self._deal(losses.popleft())

    def check(self, plan: m.StepPlan) -> None:
        """Check that the plan of a whole batch is just this."""
        work = {NODES[one.rank]: one for one in plan.work}
        assert list(work) == self.live, plan
        assert {node: _count(one) for node, one in work.items()} == {node: self.shares[node] for node in work}, plan
        micro = {node: min(self.micro[node], self.shares[node]) for node in work}
        assert {node: one.micro_batch for node, one in work.items()} == micro, plan
        assert plan.global_batch == self.global_batch, plan
        assert plan.learning_rate == pytest.approx(self.learning_rate(plan.step), rel=1e-9), plan


def check_edits(cluster: Nodes, run: str, config: dict[str, Any]) -> Counter[int]:
    """Each plan of the run, from its first on, has what the edits up to its step come to, and the plans of one step
    alone carry an edit. Gives how many edits each step took."""
    edits, state, crowd = applied_commands(cluster, run), State.of_start(config), Counter()
    losses = lost_and_back(cluster, run)
    carried: Counter[str] = Counter()
    for step, plans in _train_plans(cluster, run).items():
        # A batch that was given up is planned again, perhaps with more; one that was half done keeps what it had.
        settled = [plan for plan in plans if plan.finishes is None][-1]
        for plan in plans[plans.index(settled) :]:
            assert _rule(plan) == _rule(settled)
        for edit in (edits[id] for id in settled.commands):
            assert edit.step == step
            before = _counts(edit.before) if edit.verb in ("rebalance", "drain", "admit") else {}
            state.catch_up(losses, before)
            state.take(edit)
        state.catch_up(losses, {NODES[work.rank]: _count(work) for work in settled.work})
        state.check(settled)
        carried.update(settled.commands)
        crowd[step] = sum(edits[id].verb in EDITS for id in settled.commands)
    assert carried == Counter(id for id, edit in edits.items() if edit.verb in (*EDITS, "start-run", "resume"))
    return crowd


def _rule(plan: m.StepPlan) -> tuple[Any, ...]:
    """Return what a half-done batch is finished by, as it was begun."""
    return plan.commands, plan.learning_rate, plan.global_batch, plan.divisor, plan.cursor


def _train_plans(cluster: Nodes, run: str) -> dict[int, list[m.StepPlan]]:
    """By step, ascending; of one step in the order in which they were journaled."""
    by_step: dict[int, list[m.StepPlan]] = {}
    for plan in plans_of(cluster.run_paths(NODES[0], run)):
        if plan.kind == "train":
            by_step.setdefault(plan.step, []).append(plan)
    assert list(by_step) == list(range(1, len(by_step) + 1))
    return by_step


def applied_commands(cluster: Nodes, run: str) -> dict[str, Applied]:
    """By command id, from the ledger of the lead."""
    query = "SELECT id, verb, args, node, step, before, after FROM commands WHERE run = ? AND state = 'applied'"
    with closing(sqlite3.connect(cluster[NODES[0]].directory / "agent.db")) as ledger:
        rows = ledger.execute(query, (run,)).fetchall()
    return {id: Applied(verb, json.loads(args), *rest) for id, verb, args, *rest in rows}


def lost_and_back(cluster: Nodes, run: str) -> "deque[dict[str, int]]":
    """The shares of the nodes concerned after each loss and each return of a rank, oldest first."""
    with RecordReader(cluster.run_paths(NODES[0], run)) as reader:
        found, after, more = deque[dict[str, int]](), 0, True
        while more:
            events, more = reader.events(after, 500)
            ours = [event for event in events if (event.kind, event.by) == ("rank", "auto")]
            found += [event.data.after for event in ours if isinstance(event.data, SharesChanged)]
            after = events[-1].id if events else after
    return found


def check_steps(cluster: Nodes, run: str, first: int, last: int) -> None:
    """Check that every rank did every step as its plan has it, each position once: by the lead's journal and rows, and
    the followers' journals."""
    plans = {plan.step: plan for plan in plans_of(cluster.run_paths(NODES[0], run)) if plan.kind == "train"}
    seen = {node: {plan.step: plan for plan in plans_of(cluster.run_paths(node, run)) if plan.kind == "train"}
            for node in NODES[1:]}  # fmt: skip
    with RecordReader(cluster.run_paths(NODES[0], run)) as reader:
        steps, _ = reader.steps(first - 1, last - first + 1)
        assert [step.step for step in steps] == list(range(first, last + 1))
        given = given_state(reader)
        for step in steps:
            plan = plans[step.step]
            rows = {row.rank: row for row in reader.rank_steps(step.step)}
            _check_step(plan, step, rows, {rank for at, rank in given if at == step.step})
            for work in plan.work:
                node = NODES[work.rank]
                assert node not in seen or seen[node][step.step] == plan, (node, step.step)


def given_state(reader: RecordReader) -> set[tuple[int, int]]:
    """Return steps, each with a rank that may have no row of it.

    A rank that lost its reducer once the sum was there has not applied it by itself: it was given the others' state at
    once, or was lost and came back later.
    """
    found, after, more = set(), 0, True
    while more:
        events, more = reader.events(after, 500)
        for event in events:
            if isinstance(event.data, GenerationFormed):
                found |= {(event.step or 0, NODES.index(node)) for node in event.data.behind}
            elif isinstance(event.data, SharesChanged) and event.data.lost:
                found.add((event.step or 0, NODES.index(event.data.lost)))
        after = events[-1].id if events else after
    return found


def _check_step(plan: m.StepPlan, step: m.StepCommitted, rows: dict[int, m.RankStep], given: set[int]) -> None:
    planned = {work.rank for work in plan.work}
    assert planned - given <= set(rows) <= planned, step.step
    assert plan.global_batch == step.global_batch, step.step
    assert sum(row.samples for row in rows.values()) == plan.global_batch or set(rows) != planned, step.step
    assert (plan.learning_rate, plan.cursor + plan.global_batch) == (step.learning_rate, step.cursor)
    positions = [at for work in plan.work for piece in work.ranges for at in range(piece.start, piece.stop)]
    batch = list(range(plan.cursor, plan.cursor + plan.global_batch))
    assert len(set(positions)) == len(positions) and set(positions) <= set(batch), step.step
    if plan.finishes is None:
        assert sorted(positions) == batch, step.step
    for work in (work for work in plan.work if plan.finishes is None and work.rank in rows):
        assert (rows[work.rank].micro_batch, rows[work.rank].samples) == (work.micro_batch, _count(work)), step.step


def _count(work: m.RankWork) -> int:
    return sum(piece.count for piece in work.ranges)


def _counts(text: str) -> dict[str, int]:
    """`alpha=4 beta=8` as numbers by node."""
    return {node: int(count) for node, count in (part.split("=") for part in text.split())}
