"""With several leads, the screens follow one of them, and another one when that is asked for."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from tests.tui.support.scripted import Scripted, scripted
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.tui.state.source import ClusterSource

RUN: m.RunView = examples.EXAMPLES["published by an agent"]["run-view"]
ROW: m.RunSummary = examples.EXAMPLES["agent to client"]["runs"].runs[0]


def leading(run: str, node: str, term: int, started_at: float, at: Callable[[], Scripted], **fields: Any) -> Any:
    """Return how an agent answers that leads a run."""
    view = msgspec.structs.replace(RUN, run=run, lead=node, state="running", generation=m.Generation(term, 1))
    row = msgspec.structs.replace(ROW, run=run, lead=node, state="running", started_at=started_at, kind="hosted")

    def answer(request: m.ClientRequest) -> list[m.AgentReply | bytes]:
        if isinstance(request, m.RunsRequest):
            return [m.Runs(rid="", runs=(row,))]
        own = msgspec.structs.replace(at().snapshot().node, node=node)
        return [at().snapshot(node=own, run=view, **{name: make() for name, make in fields.items()})]

    return answer


async def test_another_lead_s_run_is_listed_and_followed_only_when_it_is_asked_for() -> None:
    with (
        scripted(leading("newer", "mbp", 7, 20.0, lambda: other)) as other,
        scripted(
            leading(
                "older", "studio", 3, 10.0, lambda: first,
                peers=lambda: (m.PeerView("mbp", other.address, other.live_address, "connected", 0.0),),
            )
        ) as first,
    ):  # fmt: skip
        source, followed, met = ClusterSource(first.address, by="anna"), list[str](), False
        async with asyncio.timeout(HANG_SECONDS), source:
            async for node, item in source.follow(0):
                if isinstance(item, m.Snapshot):
                    followed.append(node)
                    assert item.run is not None and item.run.run == {"studio": "older", "mbp": "newer"}[node]
                    if node == "mbp":
                        break
                elif isinstance(item, m.NodeView) and node == "mbp" and not met:
                    met = True
                    assert [row.run for row in (await source.runs()).runs] == ["newer", "older"]
                    assert not await source.follow_run("older")
                    assert not await source.follow_run("unheard-of")
                    assert await source.follow_run("newer")
            assert source.address == other.address
        assert followed == ["studio", "mbp"]
