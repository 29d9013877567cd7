"""Runs that other programs train: attached to a live agent, recorded exactly once, beside the hosted run."""

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.asking import run_of
from tests.cluster.in_process import BlockingAgent
from tests.cluster.run_files import FOREVER, NODE
from tests.cluster.waits import wait_for_step
from tests.tui.support.cli_calls import call_json
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.client import Client
from trainctl.protocol.errors import RefusedError, TrainctlError
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.reader import RecordReader

RUN = "mine-1"
RANKS = (m.GuestRank(0, backend="jax", device="tpu"), m.GuestRank(1))


def steps(first: int, last: int, loss: float | None = 2.0) -> list[m.GuestStep]:
    """Two ranks, the second of which brings no metric of its own."""
    return [
        m.GuestStep(
            step=step, committed_at=1e9 + step, step_seconds=0.1, samples=8, tokens=32, weight=32.0, loss=loss,
            values={"user:reward": -step}, parts=(
                m.GuestPart(0, 24.0, 24.0, 6, phases=m.Phases(forward=0.05), values={"user:kl": step / 10}),
                m.GuestPart(1, 8.0, 8.0, 2),
            ),
        )
        for step in range(first, last + 1)
    ]  # fmt: skip


@pytest.fixture
def live(agent: BlockingAgent, run_config: Any) -> BlockingAgent:
    """An agent whose hosted run goes on and on."""
    with agent.client() as client:
        client.send("start-run", {"config": run_config(run__steps=FOREVER)})
        wait_for_step(client, 1)
    return agent


def recorded(agent: BlockingAgent, run: str = RUN) -> list[int]:
    with RecordReader(agent.run_paths(run)) as reader:
        return [step.step for step in reader.steps(0, 1000)[0]]


def test_a_run_is_shown_recorded_and_ended(agent: BlockingAgent) -> None:
    with agent.client() as client:
        kept = client.attach_run(RUN, "ppo", RANKS, steps=100)
        assert (kept.step, Path(kept.directory)) == (0, agent.run_paths(RUN).directory)
        assert client.run_steps(RUN, steps(1, 20)).step == 20
        shown = client.ask(m.SnapshotRequest)
        assert shown.run is not None and (shown.run.run, shown.run.kind, shown.run.step) == (RUN, "guest", 20)
        assert [(rank.rank, rank.node, rank.state, rank.share) for rank in shown.run.ranks] == [
            (0, NODE, "run", None), (1, NODE, "run", None)
        ]  # fmt: skip
        assert [one.run for one in shown.runs] == [RUN]
        assert shown.last_step is not None and shown.last_step.tokens_total == 20 * 32
        series = client.ask(m.HistoryRequest, RUN, ("user:reward", "user:kl", "loss")).series
        assert {(one.metric, one.rank, one.last[-1]) for one in series if one.last} == {
            ("user:reward", None, -20.0), ("user:kl", 0, 2.0), ("loss", None, 2.0)
        }  # fmt: skip
        assert client.run_steps(RUN, steps(15, 22)).step == 22
        client.end_run(RUN)
        (known,) = client.ask(m.RunsRequest).runs
        assert (known.run, known.kind, known.state, known.step, known.last_loss) == (RUN, "guest", "finished", 22, 2.0)
        assert client.ask(m.SnapshotRequest).runs == ()
        with pytest.raises(RefusedError, match="attach it first"):
            client.run_steps(RUN, steps(23, 23))
    assert recorded(agent) == list(range(1, 23))
    listed = call_json("ls", "--connect", agent.address)
    assert (listed["runs"][0]["run"], listed["runs"][0]["kind"]) == (RUN, "guest")


def test_what_it_does_not_take_is_refused_with_the_reason_and_a_note_is_kept(agent: BlockingAgent) -> None:
    with agent.client() as client:
        client.attach_run(RUN, "ppo", RANKS)
        client.run_steps(RUN, steps(1, 3))
        for run in (RUN, None):
            refused = client.send("pause", {}, run=run)
            assert (refused.state, refused.reason) == (
                "rejected",
                f"{RUN} does not support pause: a different program trains this run",
            )
        noted = client.send("note", {"text": "looks odd"}, run=RUN)
        assert (noted.state, noted.step) == ("applied", 3)
        texts = [event.text for event in client.ask(m.EventsRequest, RUN).events]
        assert "looks odd" in texts and sum("a different program trains this run" in text for text in texts) == 2
        resumed = client.send("start-run", {"resume": RUN})
        assert resumed.state == "rejected" and "another program" in resumed.reason
        client.end_run(RUN, "stopped")
    with agent.client(by="auto:replays") as client:
        client.send("note", {"text": "a person's"}, run=RUN)
        assert client.ask(m.EventsRequest, RUN, newest=True).events[-1].by == "user auto:replays"


def test_what_a_program_does_not_count_is_not_0_and_it_has_no_log(agent: BlockingAgent) -> None:
    with agent.client() as client:
        client.attach_run(RUN, "ppo", (m.GuestRank(0),))
        for number, unknown in ((1, 0), (2, None)):
            part = m.GuestPart(0, tokens=unknown, samples=unknown)
            made = m.GuestStep(number, 1e9 + number, 0.1, samples=unknown, tokens=unknown, parts=(part,))
            assert client.run_steps(RUN, [made]).step == number
            shown = client.ask(m.SnapshotRequest, 0, RUN)
            assert shown.last_step is not None and shown.last_step.tokens is None
            assert shown.run is not None and shown.run.loss_unit == ""
            assert shown.runs[0].rates is not None and shown.runs[0].rates.samples_per_second is None
            assert not any(series.steps for series in client.ask(m.HistoryRequest, RUN, ("busy_seconds",)).series)
        with pytest.raises(RefusedError, match="keeps its own output"):
            client.ask(m.LogRequest, RUN)
        client.end_run(RUN)


def test_an_agent_that_is_killed_loses_and_repeats_no_step(agent: BlockingAgent) -> None:
    with agent.client() as client:
        client.attach_run(RUN, "ppo", RANKS)
        client.run_steps(RUN, steps(1, 40))
    agent.kill()
    agent.start()
    with agent.client() as client:
        kept = client.run_steps(RUN).step  # live again without being attached again
        assert kept <= 40
        assert client.run_steps(RUN, steps(kept + 1, 60)).step == 60
        shown = client.ask(m.SnapshotRequest, run=RUN)
        assert shown.last_step is not None and shown.last_step.tokens_total == 60 * 32
        client.end_run(RUN)
    assert recorded(agent) == list(range(1, 61))


def test_a_program_that_goes_back_retracts_what_it_had_done(agent: BlockingAgent) -> None:
    with agent.client() as client:
        client.attach_run(RUN, "ppo", RANKS)
        client.run_steps(RUN, steps(1, 30, loss=9.0))
        assert client.attach_run(RUN, "ppo", RANKS, after_step=10).step == 10
        client.run_steps(RUN, steps(11, 12, loss=math.nan))
        (loss,) = client.ask(m.HistoryRequest, RUN, ("loss",)).series
        assert loss.steps == tuple(range(1, 11))  # a NaN has no bucket
        shown = client.ask(m.SnapshotRequest, run=RUN)
        assert shown.last_step is not None and shown.last_step.loss is not None and math.isnan(shown.last_step.loss)
        (listed,) = call_json("ls", "--connect", agent.address)["runs"]
        assert listed["last_loss"] == "NaN"
        alerts = until(lambda: call_json("alerts", "--connect", agent.address)["alerts"], what="the alert")
        assert [(alert["id"], alert["severity"]) for alert in alerts] == [(f"nonfinite:{RUN}", "error")]
        assert alerts[0]["text"].startswith("ppo: loss is nan at step 1")
        assert client.send("acknowledge", {"id": f"nonfinite:{RUN}"}).state == "applied"
        assert "alert" in {event.kind for event in client.ask(m.EventsRequest, RUN).events}
        assert shown.run is not None and shown.run.generation == m.Generation(1, 2)
        client.end_run(RUN)
        *_, cleared, ended = client.ask(m.EventsRequest, RUN).events
        assert isinstance(cleared.data, e.AlertCleared) and cleared.data.id == f"nonfinite:{RUN}"
        assert isinstance(ended.data, e.RunStateChanged)
        assert call_json("alerts", "--connect", agent.address)["alerts"] == []
    assert recorded(agent) == list(range(1, 13))


def test_times_that_are_no_numbers_are_refused_and_metrics_may_be(agent: BlockingAgent) -> None:
    with agent.client() as client:
        client.attach_run(RUN, "ppo", RANKS)
        for wrong in ({"committed_at": math.nan}, {"step_seconds": math.inf}):
            with pytest.raises(TrainctlError, match="finite"):
                client.run_steps(RUN, [msgspec.structs.replace(steps(1, 1)[0], **wrong)])
        odd = msgspec.structs.replace(steps(1, 1)[0], values={"user:kl": math.inf})
        assert client.run_steps(RUN, [odd]).step == 1
        client.end_run(RUN)
    assert recorded(agent) == [1]


def test_it_lives_beside_the_hosted_run(live: BlockingAgent) -> None:
    run = "beside-1"

    async def follow(client: Client, wanted: set[tuple[str, str]]) -> None:
        async for item in client.attach(0):
            if isinstance(item, m.StepCommitted):
                wanted.discard(("step", item.run))
            if isinstance(item, m.RunView) and item.run == run:
                wanted.discard((item.state, run))
            if not wanted:
                return

    async def both(hosted: str) -> None:
        async with Client(live.address, timeout_seconds=HANG_SECONDS) as client:
            wanted = {("step", hosted), ("step", run), ("finished", run)}
            following = asyncio.create_task(follow(client, wanted))
            await client.attach_run(run, "beside", RANKS)
            shown = await client.ask(m.SnapshotRequest, 0)
            assert shown.run is not None and shown.run.run == hosted
            assert [one.run for one in shown.runs] == [hosted, run]
            reply = await client.send("resize-batch", {"micro": 3})
            assert (reply.state, reply.run) == ("applied", hosted)
            number = 0
            while ("step", run) in wanted:  # the attachment may have come after the first ones
                number += 1
                await client.run_steps(run, steps(number, number))
            await client.end_run(run)
            await asyncio.wait_for(following, HANG_SECONDS)

    with live.client() as client:
        view = run_of(client)
        assert view is not None
        asyncio.run(both(view.run))
        assert client.send("note", {"text": "of the hosted run"}).run == view.run


def test_two_programs_cannot_take_a_hosted_runs_id(live: BlockingAgent) -> None:
    with live.client() as client:
        view = run_of(client)
        assert view is not None
        with pytest.raises(RefusedError, match="choose a different id"):
            client.attach_run(view.run, "thief", RANKS)
        assert run_of(client).kind == "hosted"  # type: ignore[union-attr]
