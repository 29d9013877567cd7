"""Commands by the keys of a screen to a real run; tests/node_agent/runs/test_commands.py has the rest of them."""

import asyncio
import random
import time

from tests.waiting import HANG_SECONDS

from trainctl.protocol.client.client import Client
from trainctl.protocol.messages import SnapshotRequest
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.wire.codec import decode_order
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.state.source import ClusterSource


async def test_from_key_press_to_applied_at_the_step_that_the_reply_names(live):
    """In the full-screen program. How long it takes is measured by benchmarks/key_press.py."""
    async with Client(live.address, by="tester", timeout_seconds=HANG_SECONDS) as client:
        app = TrainctlApp(lambda: ClusterSource(live.address, by="tester", timeout_seconds=HANG_SECONDS))
        async with app.run_test(size=(80, 24)) as pilot:
            await reached(pilot, lambda: app.shown.run is not None and app.shown.run.state == "running")
            chance = random.Random(3)
            for index in range(4):
                micro = 2 + index % 2
                before = (await client.ask(SnapshotRequest, 0)).run.step
                step = await resize_by_keys(pilot, app, str(micro), chance.uniform(0.0, 0.1))
                assert step > before
                assert micro_batch_of(live, step) == micro
                assert micro_batch_of(live, step - 1) != micro


def micro_batch_of(agent, step: int) -> int:
    """By the plan in the journal."""
    record = open_for_reading(agent.run_paths(agent.lasting).record)
    (body,) = record.execute("SELECT body FROM plans WHERE kind = 'train' AND step = ?", (step,)).fetchone()
    record.close()
    return decode_order(body).work[0].micro_batch


async def resize_by_keys(pilot, app, micro: str, pause: float) -> int:
    """Open the dialog, type, press Enter at some moment of a step; the step it names."""
    await pilot.press("b")
    await reached(pilot, lambda: isinstance(app.screen, CommandDialog))
    dialog = app.screen
    await pilot.press("ctrl+u", *micro)
    await asyncio.sleep(pause)
    begun = time.monotonic()
    app.simulate_key("enter")
    while dialog.progress is None or not dialog.progress.ended:
        assert time.monotonic() - begun < HANG_SECONDS
        await asyncio.sleep(0.002)
    assert dialog.progress.reply.state == "applied", dialog.progress.reply
    await pilot.press("escape")
    return dialog.progress.reply.step


async def reached(pilot, condition) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await pilot.pause(0.02)
