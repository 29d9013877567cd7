"""A lead whose record has lost the end of its log, or all of it: the run goes on from its checkpoint."""

import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.asking import events_of, run_of
from tests.cluster.waits import all_steps, wait_for_checkpoint, wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import Notice


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_run_whose_lead_lost_its_log_resumes_from_the_checkpoint(
    run_config: Any, tmp_path: Path, is_gone: bool
) -> None:
    """The log is cut in half, or removed, while the agent and its trainer are dead."""
    agent = AgentProcess(tmp_path / "state").start()
    try:
        with agent.client() as client:
            run = client.send("start-run", {"config": run_config(run__steps=100_000)}).run
            wait_for_step(client, 30)
            assert client.send("checkpoint", {}).state == "applied"
            at = wait_for_checkpoint(client, run)
        found = agent.trainer_pids()
        agent.kill()
        for pid in found:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        until(lambda: not agent.trainer_pids(), what="the trainer's end")
        log = agent.run_paths(run).record.with_name("record.db-wal")
        content = log.read_bytes()
        assert content
        log.unlink()
        if not is_gone:
            log.write_bytes(content[: len(content) // 2])
        agent.start()
        with agent.client() as client:

            def continued() -> bool:
                view = run_of(client)
                if view is None or view.state not in m.ACTIVE_RUN_STATES:
                    reply = client.send("start-run", {"resume": run})
                    assert reply.state == "applied", reply.reason
                    return False
                return view.state == "running" and view.step > at + 3

            until(continued, 120, "steps after the checkpoint", lambda: run_of(client))
            notices = [
                event.data.text
                for event in events_of(client, run)
                if isinstance(event.data, Notice) and "lost" in event.data.text
            ]
            assert len(notices) == 1 and notices[0].endswith(f"continues from its checkpoint of step {at:,}")
            steps = [step.step for step in all_steps(client, run)]
            assert [step for step in steps if step > at] == [*range(at + 1, steps[-1] + 1)]
            client.send("stop", {"checkpoint": False})
            wait_for_end(client)
    finally:
        agent.clean_up()
