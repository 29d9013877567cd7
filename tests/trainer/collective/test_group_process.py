"""Two trainers, of unlike backends and with paths of their own, as the agents of a group see them."""

import contextlib
import os
import re
import shutil
import signal

import psutil
import pytest
from tests.trainer.support.process_agent import G, settings
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.record import log_format
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout

pytestmark = pytest.mark.tier("all")


class Agents:
    """Both ranks' agents in one, which counts generations."""

    def __init__(self, agent):
        self.agent, self.generation = agent, m.Generation(1, 0)

    def hear_both(self, kind, wanted=lambda message: True):
        return [self.agent.hear(kind, wanted, rank) for rank in (0, 1)]

    def plan(self, seq, step, **changes):
        cursor = max(0, step - 1) * G
        work = (m.RankWork(0, (m.Range(cursor, 8),), 3), m.RankWork(1, (m.Range(cursor + 8, 4),), 4))
        return self.agent.plan_of(seq, step, self.generation, **({"work": work} | changes))

    def run(self, plan):
        self.agent.tell(plan, 0, 1)
        return self.hear_both(m.Report, lambda report: report.seq == plan.seq)

    def offer(self, engine):
        self.generation = self.generation.next()
        return m.Offer(run="r", generation=self.generation, engine=engine)

    def form(self, offer, *endpoints):
        return m.Form(run="r", generation=offer.generation, engine=offer.engine, ranks=(0, 1), endpoints=endpoints)

    def fence(self):
        self.generation = self.generation.next()
        self.agent.tell(m.Fence(run="r", generation=self.generation))
        return self.agent.hear(m.Fenced)


@pytest.fixture
def agents(agent, tmp_path, run_file, assets):
    elsewhere = tmp_path / "elsewhere"
    for name in ("model", "text"):
        shutil.copytree(assets / name, elsewhere / name)
    there = {"backend": "mlx", "device": "cpu", "model_path": str(elsewhere / "model")}
    there |= {"data_path": str(elsewhere / "text"), "cache_path": str(elsewhere / "caches")}
    nodes = settings(tmp_path)["nodes"] | {"there": there}
    run_file(nodes=nodes)
    agent.start()
    agent.start(node="there", rank=1)
    return Agents(agent)


def test_two_trainers_train_as_one_and_survive_each_other_and_a_signal_ends_one_that_waits(agents, agent, fork_servers):
    first, second = agents.hear_both(m.Ready)
    assert (first.backend, second.backend) == ("torch", "mlx")
    for field in ("layout_digest", "model_digest", "data_digest", "model_files", "data_files", "system", "samples"):
        assert getattr(first, field) == getattr(second, field), field
    assert [file.name for file in first.model_files] == ["config.json", "model.safetensors"]
    assert [file.name for file in first.data_files] == ["a.txt", "b.txt"]
    assert first.engines == second.engines == ("gloo", "ring")
    assert first.system == os.uname().sysname

    offer = agents.offer("gloo")
    agent.tell(offer, 0, 1)
    agent.tell(agents.form(offer, *(offered.endpoints for offered in agents.hear_both(m.Offered))), 0, 1)
    assert all(formed.join_seconds > 0 for formed in agents.hear_both(m.Formed))
    one, other = agents.run(agents.plan(1, 1))
    assert one.loss_sum == other.loss_sum
    assert (one.own_samples, other.own_samples, one.weight, other.weight) == (8, 4, 240.0, 240.0)
    one, other = agents.run(agents.plan(2, 1, kind="sync"))
    assert one.drift == 0.0 and other.drift is not None and 0 <= other.drift < 1e-4
    assert all((each.samples_per_second or 0) > 0 for each in agents.run(agents.plan(3, 1, kind="measure")))
    assert [agents.run(agents.plan(seq, seq - 2))[0].step for seq in (4, 5)] == [2, 3]

    children = [psutil.Process(process.pid).children(recursive=True) for process in agent.processes]
    assert [len(found) for found in children] == [2, 2], "one in the group and the one that made it"
    plan = agents.plan(6, 4)
    agent.tell(plan)
    agent.hear(m.Soon, lambda soon: soon.seq == 6)
    agent.tell(agents.plan(7, 5))  # issued ahead; nothing may come of it
    agent.processes[1].kill()
    agent.processes[1].wait(HANG_SECONDS)
    failed = agent.hear(m.GroupFailed)
    assert re.fullmatch("connection to there was (reset|closed)", failed.reason), failed.reason
    assert not psutil.wait_procs(children[1], timeout=HANG_SECONDS)[1], "no reducer outlives its trainer"
    fenced = agents.fence()
    assert (fenced.last_step, fenced.held_from, fenced.held) == (3, plan.generation, (m.Range(36, 8),))

    agents.generation = agents.generation.next()
    agent.form(agents.generation)
    rest = (m.RankWork(0, (m.Range(44, 4),), 4),)
    report = agent.step(8, 4, agents.generation, work=rest, finishes=plan.generation)
    assert (report.step, report.own_samples, report.weight, report.skipped) == (4, G, 240.0, None)

    agents.fence()
    with waiting_for_others(agents, first.layout_digest, fork_servers):
        process = agent.processes[0]
        left = psutil.Process(process.pid).children(recursive=True)
        assert len(left) == 2
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 143
    assert log_format.read(log.splitlines()[-1])[1:] == ("INFO", "leaving: ended by a signal")
    assert not psutil.wait_procs(left, timeout=HANG_SECONDS)[1]


@contextlib.contextmanager
def waiting_for_others(agents, digest, fork_servers):
    """Rank 0 is in a group by the ring with a rank 1 of this process, which stays away from the sum."""
    agent, offer = agents.agent, agents.offer("ring")
    peer = Membership(1, Layout({"a": (4,)}, digest), GroupTable(), "", None, fork_servers)
    agent.tell(offer)
    form = agents.form(offer, agent.hear(m.Offered).endpoints, peer.offer(offer))
    agent.tell(form)
    group = peer.form(form)
    try:
        group.complete()
        agent.hear(m.Formed, lambda formed: formed.generation == form.generation)
        agent.tell(agents.plan(9, 5))
        agent.hear(m.Soon, lambda soon: soon.seq == 9)
        yield
    finally:
        peer.close()
        group.close()
