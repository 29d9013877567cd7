"""A command that waits for a long step: its sender is told which step that is, and since when."""

import asyncio
import contextlib

import msgspec
import pytest
from tests.tui.support.scripted import scripted
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.tui.commands import command

SNAPSHOT: m.Snapshot = examples.EXAMPLES["agent to client"]["snapshot"]


async def test_the_sender_is_told_which_step_a_command_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LONG_SECONDS", 0.0)
    assert SNAPSHOT.run is not None and SNAPSHOT.last_step is not None
    last = msgspec.structs.replace(SNAPSHOT.last_step, step=1233, committed_at=1000.0)
    run = msgspec.structs.replace(SNAPSHOT.run, state="running")

    def answer(request: m.ClientRequest) -> list[m.AgentReply | bytes]:
        if isinstance(request, m.Command):
            return [m.CommandReply(rid="", id=request.id, state="accepted")]
        return [agent.snapshot(run=run, last_step=last, at=1035.0)]

    said: asyncio.Queue[str] = asyncio.Queue()
    with scripted(answer) as agent:
        async with asyncio.timeout(HANG_SECONDS), Client(agent.address) as client:
            order = command.make_order("pause", {})
            sending = asyncio.create_task(command.send(client, order, "applied", HANG_SECONDS, said.put_nowait))
            assert await said.get() == "pause: accepted; it waits for step 1,234, which has been under way for 35 s"
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending


@pytest.mark.parametrize("fields", [{"run": None}, {"last_step": None}])
def test_nothing_is_said_of_a_run_without_a_step_under_way(fields: dict[str, None]) -> None:
    assert command.step_under_way(msgspec.structs.replace(SNAPSHOT, **fields)) == ""
