"""A kill loop: faults at random times, so far apart on average, all made from a seed, done to a live run.

Other than faults at chosen places (faults.py) these come when they come, so also while a group is being formed or a
rank is on its way back. What they met is read from the trainers' status pages.
"""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.cluster.run_files import NODES
from tests.integration.support.clusters import Cluster
from tests.integration.support.faults import (
    FAULT_SECONDS,
    LEAD,
    SHOWN,
    VICTIMS,
    Harness,
    Victim,
    handle,
    have_loaded,
    naming,
    takes_part,
)
from tests.waiting import Patience

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record.status_page import Status

HELD_SECONDS = (2.0, 8.0)
"""For so long, at random, a service's watchdog bears with an agent that stands still. A follower's ranks are lost after
5 s, so both happens: that they are, and that they are not."""
RETURN_SECONDS = 2 * FAULT_SECONDS
"""For two ranks that were lost one after the other to load and take part again."""
LEFT_STEPS = 20
"""At a run's end, for the group to be whole once more."""
SPOKEN = {shown: phase for phase, shown in SHOWN.items()}


# ---------------------------------------------------------------- what is to happen: pure


@dataclass(frozen=True)
class Blow:
    """`signal` to the victim on `node`, so long after the blow before it, or as soon as the run can take it then."""

    after_seconds: float
    victim: Victim
    node: str
    signal: signal.Signals
    held_seconds: float
    """After which an agent that was stopped is killed and started again."""

    def __str__(self) -> str:
        held = f" for {self.held_seconds:.1f} s" if "agent" in self.victim and self.signal == signal.SIGSTOP else ""
        return f"{self.signal.name}{held} to the {self.victim} of {self.node}, {self.after_seconds:.1f} s on"


def blows(seed: int, mean_seconds: float) -> Iterator[Blow]:
    """Without end, the same for the same arguments. Of five in a row each victim is killed once and one is stopped,
    each in its turn; the times between them are distributed exponentially."""
    chance = random.Random(f"{seed} kill loop")
    while True:
        for stopped in chance.sample(VICTIMS, len(VICTIMS)):
            five = [*((victim, signal.SIGKILL) for victim in VICTIMS), (stopped, signal.SIGSTOP)]
            for victim, number in chance.sample(five, len(five)):
                nodes = [node for node in NODES if "agent" not in victim or (victim == "lead agent") == (node == LEAD)]
                after, held = chance.expovariate(1 / mean_seconds), chance.uniform(*HELD_SECONDS)
                yield Blow(after, victim, chance.choice(nodes), number, held)


def bears(view: m.RunView, blow: Blow) -> bool:
    """Return whether the victim is there and, after it, a rank with the state of the last step; all that take part have
    it."""
    left = any(takes_part(view, [node]) for node in NODES if node != blow.node)
    return left and ("agent" in blow.victim or takes_part(view, [blow.node]))


# ---------------------------------------------------------------- done to a run


class KillLoop(Harness):
    """Strikes one run until it nears its end, prints what each blow met and when the group was whole after it, and
    shows `watch` every view of the run that it gets."""

    def __init__(
        self, cluster: Cluster, client: BlockingClient, run: str, watch: Callable[[m.RunView], None] = lambda _: None
    ) -> None:
        super().__init__(cluster, client, run)
        self._watch, self._began = watch, time.monotonic()
        self._broken: tuple[m.Generation, float] | None = None  # by a blow to this generation, and when
        self._formed: tuple[m.Generation, int] | None = None  # and the step at which it was seen first
        self.blows = 0

    def go_on(self, planned: Iterable[Blow], steps: int, stride: int) -> None:
        """One blow after another. So that a fast machine isn't done before them, the run is held after `stride` steps
        until the next one. Fails naming the blow."""
        struck_at, last = time.monotonic(), steps - LEFT_STEPS
        for turn, blow in enumerate(planned, 1):
            with naming(blow):
                if not self._await(blow, struck_at + blow.after_seconds, min(turn * stride, last), last):
                    break
                struck_at = time.monotonic()
                self._strike(blow)
        self.settle()

    def view(self) -> m.RunView:
        view = super().view()
        if self._formed is None or self._formed[0] != view.generation:
            self._formed = view.generation, view.step
        whole = takes_part(view, NODES) and self._has_stepped(view)
        if whole and self._broken is not None and view.generation > self._broken[0]:
            seconds = time.monotonic() - self._broken[1]
            self._say(f"all take part at step {view.step}, {seconds:.1f} s after the blow")
            self._broken = None
        self._watch(view)
        return view

    def _has_stepped(self, view: m.RunView) -> bool:
        """Return whether a step of its generation is done: who takes part in it has the state by then."""
        return self._formed is not None and view.step > self._formed[1]

    def _await(self, blow: Blow, at: float, held_step: int, last: int) -> bool:
        """Return whether the time and the run are ripe for the blow before the last step."""
        patience = Patience(max(0.0, at - time.monotonic()) + RETURN_SECONDS)
        while not patience.is_over():
            view = self.view()
            if view.step >= last:
                return False
            if time.monotonic() >= at and self._has_stepped(view) and bears(view, blow):
                return True
            if view.step >= held_step and view.state == "running":
                self._hold(at)
                held_step = last
            time.sleep(0.1)
        raise AssertionError(f"the run was not ready for it within {RETURN_SECONDS:g} s: {view}")

    def _hold(self, at: float) -> None:
        """Pause the run until then, and until all trainers are there."""
        self._tell("pause")
        self._until(lambda view: time.monotonic() >= at and have_loaded(view), "the lost ranks")
        self._tell("resume")

    def _strike(self, blow: Blow) -> None:
        before = self.view()
        # The agent of a node that takes no part may come and go without the group's notice.
        matters = blow.victim == "lead agent" or takes_part(before, [blow.node])
        with self._noticed() if matters else contextlib.nullcontext():
            page = self._send_now(blow)
            met = SPOKEN.get(page.phase, page.phase) if page is not None else "no trainer"
            where = f"step {page.step}, generation {page.term}.{page.n}" if page is not None else ""
            self._say(f"{blow}: met {met} {where}")
            self.done[blow.victim, blow.signal.name, met] += 1
            self.blows, self._broken = self.blows + 1, (before.generation, time.monotonic())
            if "agent" in blow.victim:
                if blow.signal == signal.SIGSTOP:
                    time.sleep(blow.held_seconds)
                self._cluster[blow.node].kill()
                self._cluster.start(blow.node)

    def _send_now(self, blow: Blow) -> Status | None:
        """To the processes there are; gives what the page of the node's trainer shows at that moment, if one lives."""
        patience = Patience(FAULT_SECONDS)
        while not patience.is_over():
            with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:
                trainers = self._cluster[blow.node].trainer_pids()
                held = [stack.enter_context(handle(pid)) for pid in self._victims(blow, trainers)]
                if held:
                    page = self._page(blow.node)
                    for one in held:
                        signal.pidfd_send_signal(one, blow.signal)
                    return page if page is not None and page.pid in trainers else None
            self.view()
        raise AssertionError(f"no {blow.victim} to be found within {FAULT_SECONDS:g} s")

    def _tell(self, verb: str) -> None:
        reply = self._client.send(verb, {})
        assert reply.state == "applied", reply

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {what}", flush=True)
