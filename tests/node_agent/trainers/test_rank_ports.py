"""A rank that this agent hosts: one that was told to leave and hangs is ended."""

import asyncio
import sys
import time

import zmq
import zmq.asyncio
from tests.node_agent.support.processes import ENVIRONMENT, wait_for
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.trainers import rank_ports
from trainctl.node_agent.trainers.ipc import TrainerLink
from trainctl.node_agent.trainers.supervisor import TrainerSupervisor
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec

HUNG = """
import sys, time, zmq
trainer = zmq.Context().socket(zmq.DEALER)
trainer.connect(sys.argv[1])
trainer.send(bytes.fromhex(sys.argv[2]))
while True:
    print(trainer.recv(), flush=True)
"""


def test_a_trainer_that_was_told_to_leave_and_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_ports, "LEAVE_SECONDS", 0.5)
    (tmp_path / "run-1").mkdir()
    paths, host = RunPaths(tmp_path / "run-1"), TrainerSupervisor()
    alive = codec.encode(m.Alive(run="run-1", rank=0, generation=None, step=3, phase="forward"))

    async def main() -> tuple[rank_ports.LocalRank, float]:
        context = zmq.asyncio.Context()
        link = TrainerLink(context, tmp_path / "trainers.sock")
        host.start(paths, 0, [sys.executable, "-c", HUNG, link.endpoint, alive.hex()], ENVIRONMENT)
        assert await asyncio.wait_for(link.receive(), HANG_SECONDS) is not None
        port = rank_ports.LocalRank(host, link, paths, "a", 0)
        wait_for(lambda: port.look().pid)
        told = time.monotonic()
        assert await port.tell(m.Leave(run="run-1", reason="stopped"))
        assert port.look().ending is None
        link.remove()
        context.destroy(linger=0)
        return port, told

    port, told = asyncio.run(main())
    ending = wait_for(lambda: port.look().ending)
    assert not ending.clean and "was ended by signal 15" in ending.why
    assert time.monotonic() - told >= 0.5
