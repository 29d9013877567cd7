"""A session whose ranks have loaded, and the orders that it sends."""

import asyncio

from tests.node_agent.support.simulated_ranks import SimRank, SimWorld
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.state import Progress
from trainctl.node_agent.records.replication import Copies
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.session import LedRun, RunListener, Session
from trainctl.node_agent.trainers.rank_ports import Ending, Look
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.config.cluster_file import Prices
from trainctl.protocol.record.paths import RunPaths


class Port:
    """A rank whose messages take a link which lets other tasks run meanwhile, the lower rank's for longer."""

    def __init__(self, rank: int, told: list[tuple[int, str]]) -> None:
        self._rank, self._told = rank, told
        self.reached_monotonic, self.in_touch = 0.0, True
        self.ending: Ending | None = None
        self.reported: list[m.Report] = []  # by its own record

    def start(self, resume_from) -> None:
        raise NotImplementedError

    async def tell(self, order: m.ToTrainer) -> bool:
        for _ in range(5 - self._rank):
            await asyncio.sleep(0)
        self._told.append((self._rank, type(order).__name__))
        return True

    def look(self) -> Look:
        return Look(None, self.ending)

    def last_reports(self) -> list[m.Report]:
        return self.reported

    def doing(self) -> str:
        return "silent"

    async def end(self) -> None:
        raise NotImplementedError

    async def kill(self) -> None:
        self._told.append((self._rank, "kill"))


class LoadedSession:
    """A session of three ranks that have loaded, and all that they are sent from there on."""

    def __init__(self, paths: RunPaths, publisher: Publisher, prices: Prices = Prices()) -> None:  # noqa: B008
        self.orders: list[tuple[int, str]] = []
        self.ends: list[d.CommandEnded] = []
        run_config, kept = config(batch=12), durable(("a", "b", "c"), 12)
        self.conductor = Conductor("sim", run_config, kept, Progress())
        ports = {rank: Port(rank, self.orders) for rank in range(3)}
        recorder = RunDb(paths)
        copies = Copies(recorder, {}, list)
        led = LedRun(self.conductor, paths, recorder, copies, ports, "a", publisher, 0.0, prices)
        self.session = Session(led, RunListener(self._end))

    async def _end(self, ended: d.CommandEnded) -> None:
        self.ends.append(ended)

    async def load(self) -> "LoadedSession":
        for rank in range(3):
            await self.session.feed(SimRank(rank, SimWorld(0)).ready())
        assert self.orders == [(rank, "Offer") for rank in range(3)]
        self.orders.clear()
        return self

    def offered(self, rank: int) -> m.Offered:
        generation = self.conductor.durable.generation
        return m.Offered(run="sim", rank=rank, generation=generation, endpoints=(f"127.0.0.1:{rank + 1}",))

    def failed(self) -> m.GroupFailed:
        return m.GroupFailed(run="sim", rank=2, generation=self.conductor.durable.generation, reason="refused")
