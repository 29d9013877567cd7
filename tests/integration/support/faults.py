"""Faults at chosen places: which process, at which step, in which phase. Made from a seed, and done to a live run.

What is met is read from the trainers' status pages, so nothing in the product is there for it.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import psutil
from tests.cluster.run_files import NODES
from tests.integration.support.clusters import Cluster
from tests.waiting import Patience, until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record.status_page import Status, read_status

Victim = Literal["trainer", "reducer", "follower agent", "lead agent"]
Phase = Literal["forward", "backward", "reduce", "commit", "checkpoint", "regroup"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)
PHASES: tuple[Phase, ...] = get_args(Phase)
SHOWN = {"reduce": "sync"}
"""A status page's name of a phase, where that is another word."""
LEAD, WRITERS = NODES[0], NODES[:2]
"""The node that conducts, and those that write checkpoints while all nodes take part."""
POLL_SECONDS = 0.0002
FAULT_SECONDS = 90.0
"""For a fault to find its place, and again for the run to be whole after it."""
WATCHDOG_SECONDS = 7.0
"""After so long a service's watchdog kills an agent that stands still; the lead has lost a follower's by then."""


# ---------------------------------------------------------------- what is to happen: pure


@dataclass(frozen=True)
class Fault:
    """`signal` is sent to the victim on `node` once that node's trainer is in `phase` of `step` or of a later one."""

    victim: Victim
    node: str
    signal: signal.Signals
    step: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.signal.name} to the {self.victim} of {self.node} in {self.phase} from step {self.step} on"


def schedule(
    seed: int, count: int, steps: tuple[int, int], number: signal.Signals, victims: Sequence[Victim] = VICTIMS
) -> list[Fault]:
    """`count` faults of each victim from the first of `steps` to the last, one after another; together they are spread
    evenly over the phases. The same for the same arguments."""
    chance = random.Random(f"{seed} {number.name}")
    phases = chance.sample(PHASES, len(PHASES))
    wanted = [(victim, phases[(at * count + turn) % len(phases)]) for at, victim in enumerate(victims)
              for turn in range(count)]  # fmt: skip
    chance.shuffle(wanted)
    first, last = steps
    stride = (last - first) / len(wanted)
    return [
        Fault(victim, chance.choice(_nodes(victim, phase)), number, first + int(turn * stride), phase)
        for turn, (victim, phase) in enumerate(wanted)
    ]


def _nodes(victim: Victim, phase: Phase) -> list[str]:
    """Where a victim in a phase can be: only writers are ever seen in a checkpoint."""
    able = WRITERS if phase == "checkpoint" else NODES
    return [node for node in able if victim not in ("follower agent", "lead agent")
            or (victim == "lead agent") == (node == LEAD)]  # fmt: skip


# ---------------------------------------------------------------- done to a run


class Harness:
    """Does faults to one run, which `client` asks its lead about, and counts them by victim, signal and phase."""

    def __init__(self, cluster: Cluster, client: BlockingClient, run: str) -> None:
        self._cluster, self._client, self._run = cluster, client, run
        self.done: Counter[tuple[str, str, str]] = Counter()

    def carry_out(self, faults: Sequence[Fault]) -> None:
        """One after another, and then have the run whole. Only agents are killed while a rank is away, so that there
        is always one with the state of the last step. Fails naming the fault."""
        for fault in faults:
            with naming(fault):
                if "agent" in fault.victim and fault.phase != "regroup":
                    self.settle(fault.node)
                else:
                    self.settle()
                self.strike(fault)
        self.settle()

    def strike(self, fault: Fault) -> None:
        """Send the signal when its place has come. An agent that is killed is started again at once; one that is
        stopped is killed in a while, as a service does."""
        with self._noticed():
            self._send(fault)
            if "agent" in fault.victim:
                if fault.signal == signal.SIGSTOP:
                    self._stand_still(fault)
                self._cluster[fault.node].kill()
                self._cluster.start(fault.node)

    def _stand_still(self, fault: Fault) -> None:
        """Until the watchdog would kill the agent; once the lead has lost a follower's ranks, nothing more comes."""
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            ranks = self.view().ranks if fault.node != LEAD else ()
            if any(rank.state == "lost" for rank in ranks if rank.node == fault.node):
                break

    def strike_together(self, nodes: Sequence[str]) -> None:
        """Kill the trainers of several nodes in one moment."""
        with self._noticed(), contextlib.ExitStack() as stack:
            held = [stack.enter_context(handle(pid)) for node in nodes for pid in self._cluster[node].trainer_pids()]
            assert len(held) == len(nodes)
            for one in held:
                signal.pidfd_send_signal(one, signal.SIGKILL)
        self.done["trainer", "SIGKILL", f"any, {len(nodes)} at once"] += len(nodes)

    @contextlib.contextmanager
    def _noticed(self) -> Iterator[None]:
        """Wait for the other generation that what is done within leads to."""
        before = self.view().generation
        yield
        self._until(lambda view: view.generation > before, "the run's notice of it")

    def settle(self, *nodes: str) -> m.RunView:
        """The run once these nodes, or all, take part again. So that a fast machine doesn't finish it before a trainer
        has loaded, it is paused for the rest of that time when the others have gone on without it."""
        wanted = nodes or NODES
        before = self.view()
        after = self._until(lambda view: takes_part(view, wanted) or lives_on(view, before.step + 2), "steps")
        if takes_part(after, wanted):
            return after
        for verb, condition in (("pause", have_loaded), ("resume", lambda view: takes_part(view, wanted))):
            reply = self._client.send(verb, {})
            assert reply.state == "applied", reply
            after = self._until(condition, "the lost ranks")
        return after

    def view(self) -> m.RunView:
        """The run, which must not have ended."""
        view = until(lambda: self._client.ask(m.SnapshotRequest, 0, self._run).run, FAULT_SECONDS, "the lead's word")
        assert view.state in m.ACTIVE_RUN_STATES, f"{view.state} at step {view.step}: {view.reason}"
        return view

    def _until(self, condition: Callable[[m.RunView], bool], what: str) -> m.RunView:
        patience = Patience(FAULT_SECONDS)
        while not condition(view := self.view()):
            assert not patience.is_over(), f"{what} did not come within {FAULT_SECONDS:g} s of a quiet machine: {view}"
            time.sleep(0.1)  # a snapshot costs the lead some time
        return view

    def _send(self, fault: Fault) -> None:
        """To processes that are looked up again as long as the place is not found, for they may be replaced."""
        patience = Patience(FAULT_SECONDS)
        while not patience.is_over():
            self.view()
            with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:
                trainers = self._cluster[fault.node].trainer_pids()
                pids = self._victims(fault, trainers)
                if fault.phase == "regroup" and pids:
                    pids = self._regroup(fault, trainers, pids)
                held = [stack.enter_context(handle(pid)) for pid in pids]
                if held and trainers and self._meet(fault, trainers[0]):
                    for one in held:
                        signal.pidfd_send_signal(one, fault.signal)
                    self.done[fault.victim, fault.signal.name, fault.phase] += 1
                    return
        raise AssertionError(f"no place for it within {FAULT_SECONDS:g} s")

    def _victims(self, fault: Fault, trainers: list[int]) -> list[int]:
        process = self._cluster[fault.node].process
        if fault.victim == "reducer":
            return [pid for trainer in trainers for pid in reducers(trainer)]
        return trainers if fault.victim == "trainer" else [process.pid] if process is not None else []

    def _regroup(self, fault: Fault, trainers: list[int], pids: list[int]) -> list[int]:
        """Have the group form again by killing a reducer of another node. Gives the victims from then on."""
        page = self._page(fault.node)
        if page is None or page.step < fault.step:
            time.sleep(0.02)
            return []
        other = next(other for other in reversed(NODES) if other != fault.node)
        for pid in [pid for trainer in self._cluster[other].trainer_pids() for pid in reducers(trainer)]:
            with handle(pid) as held:
                signal.pidfd_send_signal(held, signal.SIGKILL)
            self.done["reducer", "SIGKILL", "any, for a regroup"] += 1
        if fault.victim != "reducer":
            return pids
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not (fresh := {*self._victims(fault, trainers)} - {*pids}):
            time.sleep(POLL_SECONDS)
        return [*fresh]

    def _meet(self, fault: Fault, trainer: int, seconds: float = 0.5) -> bool:
        """Return whether the trainer's page shows the fault's place soon; then at this moment."""
        wanted = SHOWN.get(fault.phase, fault.phase)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            page = self._page(fault.node)
            if page is not None and page.pid == trainer and page.step >= fault.step and page.phase == wanted:
                return True
            time.sleep(0 if fault.phase == "commit" else POLL_SECONDS)  # a commit takes no longer than a poll
        return False

    def _page(self, node: str) -> Status | None:
        return read_status(self._cluster.run_paths(node, self._run).status_page(NODES.index(node)))


def takes_part(view: m.RunView, nodes: Sequence[str]) -> bool:
    """Return whether all of these are in the group that trains."""
    return view.state == "running" and all(rank.state == "run" for rank in view.ranks if rank.node in nodes)


def lives_on(view: m.RunView, step: int) -> bool:
    """Return whether the run has come to a step without some rank."""
    return view.step >= step and any(rank.state in ("lost", "rejoining") for rank in view.ranks)


def have_loaded(view: m.RunView) -> bool:
    """Return whether every rank's trainer is there."""
    return all(rank.backend is not None for rank in view.ranks)


def reducers(trainer: int) -> list[int]:
    """The processes that the trainer's fork server has made."""
    with contextlib.suppress(psutil.Error):
        return [grand.pid for child in psutil.Process(trainer).children() for grand in child.children()]
    return []


@contextlib.contextmanager
def handle(pid: int) -> Iterator[int]:
    """A handle that stands for this process even when its number is another's."""
    held = os.pidfd_open(pid)
    try:
        yield held
    finally:
        os.close(held)


@contextlib.contextmanager
def naming(what: object) -> Iterator[None]:
    """Add to a failure within what it was at."""
    try:
        yield
    except Exception as error:
        error.add_note(f"at {what}")
        raise
