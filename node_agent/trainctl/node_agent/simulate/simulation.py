"""A simulation: ranks, lead and time together, from the first step to the end of the run, and what it came to."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from trainctl.node_agent.conductor import events as conductor_events
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.state import Progress
from trainctl.node_agent.planning.durable import RankSetting
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.recovery import Backoff
from trainctl.node_agent.simulate.bulk_record import BulkRecord
from trainctl.node_agent.simulate.models import EventQueue
from trainctl.node_agent.simulate.scenario import Scenario
from trainctl.node_agent.simulate.simulated_lead import STARTED_AT, SimulatedLead
from trainctl.node_agent.simulate.simulated_rank import make_ranks
from trainctl.node_agent.simulate.simulated_reports import host_reading
from trainctl.node_agent.trainers.supervisor import SIMULATED_NOTICE
from trainctl.protocol.messages import events as run_events
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

TICK_SECONDS = 1.0
"""Between looks at deadlines, and messages of ranks that they are alive, while a rank has no plan."""
LONG_SECONDS = 5.0
"""Seconds between looks once a rank has been at a plan for longer: each second would cost more than the steps do."""
CALM_SECONDS = 30.0
"""Between looks at deadlines while all plans are shorter."""
READING_SECONDS = 60.0
"""Between readings of a machine."""
FIRST_SECONDS, FLUSH_SECONDS = 0.5, 4.0
"""Real seconds until the record is first written, and between further writes."""


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
    """Result of a simulation."""

    lead: SimulatedLead
    ended: conductor_events.Ended
    real_seconds: float  # that the simulation took
    simulated_seconds: float
    deaths: int
    returns: int  # to a checkpoint


class Simulation:
    """One run of a scenario, in an empty run directory."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        """Makes the directory if it isn't there. Raises RefusedError or InvalidInputError."""
        self.scenario, self.paths = scenario, RunPaths(directory)
        self.queue = EventQueue()
        self._ticked = -CALM_SECONDS
        self._backoff, self._returns = Backoff(lambda: self.queue.now), 0
        durable = restore.first_durable(scenario.config)
        restore.make_directory(self.paths, scenario.config).close()
        conductor = Conductor(directory.name, scenario.config, durable, Progress())
        self.lead = self._led(conductor)
        self.ranks = make_ranks(scenario, directory.name, STARTED_AT, self.queue, lambda event: self.lead.feed(event))
        self.lead.ranks = self.ranks
        self.lead.note(conductor_events.Happened(run_events.Notice(SIMULATED_NOTICE), "info", "simulator", 0))

    def _led(self, conductor: Conductor) -> SimulatedLead:
        node = conductor.durable.settings.ranks[0].node
        prices = self.scenario.cluster.prices
        return SimulatedLead(conductor, self.paths, BulkRecord(self.paths), node, self.queue, prices)

    # ------------------------------------------------------------ time

    def begin(self) -> None:
        """Start the trainers; `queue.step` then does one thing after another."""
        for rank in self.ranks.values():
            rank.start()
        self._tick()
        self._read()

    def play(self, on_record: Callable[[], object] = lambda: None) -> SimulatedRun:
        """To the end of the run; `on_record` is called once the record can be read. The record is closed then."""
        began = time.monotonic()
        due, said = began + FIRST_SECONDS, False
        self.begin()
        while self.lead.ended is None:
            for _ in range(1000):
                if self.lead.ended is not None or not self.queue.step():
                    break
            if time.monotonic() > due and self.lead.conductor.progress.step:
                self.lead.flush()
                if not said:
                    on_record()
                said = True
                due = time.monotonic() + FLUSH_SECONDS
            if self.lead.ended is not None and self.lead.conductor.goes_back:
                self._go_back(self.lead.ended.reason)
        self.lead.close()
        if not said:
            on_record()
        deaths = sum(rank.deaths for rank in self.ranks.values())
        return SimulatedRun(self.lead, self.lead.ended, time.monotonic() - began, self.queue.now, deaths, self._returns)

    def _tick(self) -> None:
        longest = max(rank.is_busy_for for rank in self.ranks.values())  # infinite: a rank has no plan
        busy_seconds = LONG_SECONDS if longest < inf else TICK_SECONDS
        if self.queue.now - self._ticked >= (busy_seconds if longest > LONG_SECONDS else CALM_SECONDS):
            self._ticked = self.queue.now
            for rank in self.ranks.values():
                if rank.alive and rank.is_busy_for > LONG_SECONDS:
                    self.lead.feed(rank.alive_message())
            self.lead.feed(conductor_events.Ticked())
        self.queue.after(TICK_SECONDS, self._tick)

    def _read(self) -> None:
        """A reading of each machine: only what is simulated is known."""
        for node, spec in zip(self.scenario.config.nodes, self.scenario.devices.values(), strict=True):
            self.lead.recorder.host(host_reading(node, self.lead.at, spec))
        self.queue.after(READING_SECONDS, self._read)

    # ------------------------------------------------------------ back to a checkpoint

    def _go_back(self, reason: str) -> None:
        """Take the run up from its newest checkpoint, as the lead's agent does."""
        due = self._backoff.take(self.paths.directory.name, self.lead.conductor.progress.step)
        if due is None:
            self.lead.ended = conductor_events.Ended("failed", f"{reason}; it went back to a checkpoint too often")
            return
        self._returns += 1
        actions = self.lead.actions
        self.lead.close()
        at_most = restore.rollback_step(self.paths)
        source = checkpoint_source.find(self.paths, "", at_most=at_most)
        nodes = tuple(self.scenario.config.nodes)
        opening = restore.old_run(self.paths, "", nodes, source, None, clock=lambda: STARTED_AT + self.queue.now)
        opening.recorder.close()
        self.lead = self._led(opening.conductor)
        self.lead.ranks, self.lead.actions = self.ranks, actions
        for notice in opening.notices:
            self.lead.note(conductor_events.Happened(run_events.Notice(notice), "info", "auto", source.step))
        progress = opening.conductor.progress
        for rank in self.ranks.values():
            self.queue.after(due - self.queue.now, partial(rank.start, progress.step, progress.cursor))


NEWEST_STEPS = 500
"""Newest steps whose median is given, so that the first ones, before shares have settled, don't count."""


def outcome(scenario: Scenario, played: SimulatedRun, paths: RunPaths) -> dict[str, Any]:
    """As one JSON object. Seconds are simulated ones, but for `real_seconds`."""
    conductor, cost = played.lead.conductor, played.lead.view().cost
    with RecordReader(paths) as reader:
        last, totals = reader.last_step(), reader.totals()
        steps = reader.steps(max(last.step - NEWEST_STEPS, 0), NEWEST_STEPS)[0] if last is not None else ()
    median = statistics.median([step.step_seconds for step in steps]) if steps else None
    settings, samples = conductor.durable.settings, sum(step.samples for step in steps)
    rate = samples / sum(step.step_seconds for step in steps) if steps else None
    alone = {setting.node: rate_alone(scenario, rank, setting) for rank, setting in settings.ranks.items()}
    return {
        "simulated": True,
        "run": paths.directory.name,
        "run_directory": str(paths.directory),
        "state": played.ended.state,
        "reason": played.ended.reason,
        "seed": scenario.seed,
        "steps": conductor.progress.step,
        "global_batch": settings.global_batch,
        "seconds": played.simulated_seconds,
        "real_seconds": round(played.real_seconds, 3),
        "step_seconds": median,
        "samples_per_second": rate,
        "tokens_per_second": rate * scenario.config.data.sequence_length if rate is not None else None,
        "alone_samples_per_second": alone,
        "efficiency": rate / sum(alone.values()) if rate is not None else None,
        "sum_seconds": scenario.links.sum_seconds([*settings.live]),
        "time_in_steps": totals.step_seconds,
        "deaths": played.deaths,
        "generations": conductor.durable.generation.n,
        "returns": played.returns,
        "actions": {name.removeprefix("auto:"): count for name, count in sorted(played.lead.actions.items())},
        "shares": {setting.node: setting.share for setting in settings.ranks.values()},
        "micro_batches": {setting.node: setting.micro_in_force for setting in settings.ranks.values()},
        "cost": cost.spent if cost is not None else None,
        "currency": cost.currency if cost is not None else None,
        "loss": last.loss if last is not None else None,
    }


def rate_alone(scenario: Scenario, rank: int, setting: RankSetting) -> float:
    """Return the samples per second of one rank without a group, with the faster of the micro-batches that it ended
    with and that its share left of it: what the group has, the rank alone could have too."""
    device, batch = scenario.devices[rank], scenario.config.batch.global_
    rates = []
    for micro in {setting.micro_batch, setting.micro_in_force}:
        while micro > 1 and device.out_of_memory(micro):
            micro = (micro + 1) // 2
        rates.append(batch / (device.curve.share_seconds(batch, min(micro, batch)) + device.step_seconds))
    return max(rates)
