"""Random commands to a run of three nodes, many at a time, and what has to hold of them."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.cluster.folding import EDITS, applied_commands, check_edits
from tests.cluster.run_files import NODES
from tests.cluster.waits import Nodes

from trainctl.protocol.client.client import Client

SAMPLES = 12


def random_command(chance: random.Random) -> tuple[str, dict, str | None]:
    """One that is mostly sensible: about a sixth are wrong in a way that only the agent, or anyone, can tell."""
    pick = chance.random()
    if pick < 0.33:
        node = chance.choice([None, *NODES, *NODES, "nowhere"])
        return "resize-batch", {"micro": chance.choice([0, 1, 1, 1, 2, 2, 2, 3, 99])}, node
    if pick < 0.62:
        shares = chance.choice(
            [{"alpha": 6, "beta": 3}, {"alpha": 4, "gamma": 4}, {"beta": "50%"}, {"alpha": 2, "beta": 7}, {"gamma": 5},
             {"alpha": "30%", "gamma": "45%"}, {"alpha": 99, "beta": 1}, {"nowhere": 3}, None, None]
        )  # fmt: skip
        return "rebalance", {"auto": True} if shares is None else {"shares": shares}, None
    if pick < 0.86:
        value = chance.choice([1e-4, 1e-3, 3e-3, 2e-3, 5e-3, -1.0])
        return "set-lr", {"value": value, "schedule": chance.choice(["set", "scale", "scale", "scale"])}, None
    if pick < 0.93:
        value, schedule = chance.choice([SAMPLES, 13, 18, 1]), chance.choice(["set", "scale"])
        return "set-global-batch", {"value": value, "schedule": schedule}, None
    return chance.choice(
        [("note", {"text": "a note"}, None), ("note", {"text": ""}, None), ("evaluate", {}, None),
         ("checkpoint", {}, None), ("unheard-of", {}, None), ("drain", {}, "nowhere"), ("admit", {}, "nowhere")]
    )  # fmt: skip


def four_commands(chance: random.Random, batch: int) -> list[tuple[str, dict, str | None]]:
    """Now and then one of them takes a node out of the group, and one of the next four takes it back."""
    asked = [random_command(chance) for _ in range(4)]
    node = NODES[batch // 16 % len(NODES)]
    if batch < 48 and batch % 16 in (7, 8):
        asked[chance.randrange(4)] = ("drain" if batch % 16 == 7 else "admit", {}, node)
    return asked


async def send_commands(
    cluster: Nodes, client: Callable[[str], Client], run: str, config: dict[str, Any], batches: int
) -> None:
    """Four at a time, each through any agent of the cluster, and check that they are applied at one step on all ranks
    or refused. Of every 16 batches, two drain and admit a node, up to three of them."""
    chance, replies = random.Random(11), []
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(node)) for node in NODES]
        for batch in range(batches):
            asked = four_commands(chance, batch)
            sent = [chance.choice(clients).send(verb, args, node=node) for verb, args, node in asked]
            replies += zip(asked, await asyncio.gather(*sent), strict=True)
        await clients[0].send("set-global-batch", {"value": SAMPLES})
        await clients[0].send("rebalance", {"shares": dict.fromkeys(NODES, SAMPLES // len(NODES))})
    edits = [(asked, reply) for asked, reply in replies if reply.state == "applied" and asked[0] in EDITS]
    for asked, reply in replies:
        assert reply.state == "applied" or (reply.state == "rejected" and reply.reason), (asked, reply)
    assert len(edits) >= 0.6 * len(replies)
    verbs = Counter(verb if not args.get("auto") else "auto" for (verb, args, _), _ in edits)
    assert verbs["drain"] == verbs["admit"] == min(len(NODES), batches // 16) and verbs.keys() == {*EDITS, "auto"}, (
        verbs
    )
    known, crowd = applied_commands(cluster, run), check_edits(cluster, run, config)
    for (verb, args, node), reply in edits:
        edit = known[reply.id]
        assert (edit.verb, edit.args, edit.node, edit.step) == (verb, args, node, reply.step)
    assert max(crowd[reply.step] for _, reply in edits) >= 3
