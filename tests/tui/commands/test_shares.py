"""Dry runs: what a verb would change, why it would be refused, and which step it waits for."""

import asyncio
import contextlib

import msgspec
import pytest
from tests.tui.support.recorded import CLOCK, CONNECTED, run_view, snapshot
from tests.tui.support.scripted import scripted
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.messages import DryRun, RankForecast, verbs
from trainctl.tui.commands import arguments, command
from trainctl.tui.commands.forms import forecast, preview
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md

GB = 10**9
VIEW = run_view(4, step=18_240, steps=60_000)
FLEET = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(VIEW), CLOCK.at_monotonic)
EXAMPLES = {
    "start-run": "start-run resume=sft-1b-20261119-110000", "resize-batch": "resize-batch micro=4 --node forge",
    "rebalance": "rebalance studio=17 mbp=8 forge=39", "set-global-batch": "set-global-batch value=128",
    "set-lr": "set-lr value=1e-4", "checkpoint": "checkpoint", "evaluate": "evaluate",
    "sample": "sample prompt=x", "defragment": "defragment --node mbp",
    "profile": "profile steps=2 nodes=mbp,forge", "drain": "drain --node mbp",
    "admit": "admit --node mini", "promote": "promote --node forge", "pause": "pause", "resume": "resume",
    "rollback": "rollback steps=100 skip_batches=200",
    "stop": "stop", "note": "note text=x", "acknowledge": "acknowledge id=memory:forge",
    "mute": "mute kind=memory minutes=30", "autopilot": "autopilot name=first-shares mode=off",
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("checkpoint", "writes step 18,240 or the next one; the last one: 300.0 MB, loop paused 14 ms"),
        ("profile", "records the next 2 steps on mbp, forge after one that warms up; these steps are slower; "
         "curve unchanged"),
        ("drain", verbs.VERBS["drain"].summary),
        ("pause", "pauses after step 18,241, within about 3.06 s; curve unchanged"),
        ("rollback", "goes back from step 18,240 to the newest checkpoint up to step 18,140; "
         "doesn't train on the samples of the 200 global batches after it: changes the curve"),
        ("stop", "ends after step 18,241, within about 3.06 s, with a checkpoint first"),
    ],
)  # fmt: skip
def test_verbs_say_what_they_would_change(verb: str, says: str) -> None:
    assert says in preview(arguments.parse(EXAMPLES[verb]), FLEET).text


def test_without_a_run_each_is_refused_but_its_start() -> None:
    assert set(EXAMPLES) == set(verbs.VERBS)
    nothing = md.ViewState()
    ended = reducer.apply(nothing, snapshot(run_view(1, "stopped")), CLOCK.at_monotonic)
    for verb, text in EXAMPLES.items():
        order = arguments.parse(text)
        roles = (preview(order, nothing).role, preview(order, ended).role)
        always = ("start-run", "acknowledge", "mute")  # the last two are the agent's own
        assert roles == ("strong" if verb in always else "bad", "strong" if verb in (*always, "note") else "bad")


def rank(number: int = 0, share: tuple[int | None, int | None] = (16, 16), micro: tuple[int, int] = (4, 4)):
    return RankForecast(
        rank=number,
        node=f"n{number}",
        share_before=share[0],
        share=share[1],
        micro_before=micro[0],
        micro=micro[1],
    )


def with_memory(used: float, *, is_bound: bool = False) -> RankForecast:
    sizes = {"memory_bytes": used * GB, "memory_is_bound": is_bound, "memory_cap_bytes": 24 * GB}
    return msgspec.structs.replace(rank(micro=(4, 8)), **sizes)


def found(verb: str = "resize-batch", *ranks: RankForecast, **fields: object) -> str:
    return forecast(DryRun(rid="r", run="run", verb=verb, ranks=ranks, **fields))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            found("resize-batch", with_memory(20), step=120, step_seconds_before=3.06, step_seconds=2.99),
            "n0 4×4 → 8×2; predicted 3.06 → 2.99 s; predicted memory 20 of 24 GB; at step 120; curve unchanged",
        ),
        (
            found("rebalance", rank(0, (16, 17)), rank(1, (8, 7)), advising=("rebalance",)),
            "n0 16 → 17, n1 8 → 7; step time isn't known yet; curve unchanged; policy rebalance will only advise",
        ),
        (found("drain", rank(0, (4, None)), rank(1, (4, 8))), "n0 4 → 0, n1 4 → 8; step time isn't known yet"),
        (found("set-lr", before="1e-3", after="5e-4 scaled", step=7), "lr 1e-3 → 5e-4 scaled; at step 7; changes the"),
        (found("set-lr", before="1e-3", after="1e-3"), "lr 1e-3 → 1e-3; changes the curve"),
        (found("resize-batch", before="4", after="4"), "no change: already set; curve unchanged"),
        (found("rollback", after="the run will go back"), "the run will go back; changes the curve"),
        (found(refused="99 is over the share", field="micro"), "micro: 99 is over the share"),
        (found(refused="the run is stopping", field="run"), "the run is stopping"),
    ],
)
def test_a_dry_run_is_said_in_one_line(said: str, expected: str) -> None:
    assert said.startswith(expected)


def test_who_would_not_fit_is_named() -> None:
    assert "n0 is over its memory: 28 of 24 GB" in found("resize-batch", with_memory(28))
    assert "n0 may be over its memory: at most 32 of 24 GB" in found("resize-batch", with_memory(32, is_bound=True))
    assert "; fits; " in found("resize-batch", with_memory(20), with_memory(21))
    assert "fits" not in found("resize-batch", rank(micro=(4, 8)))


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
