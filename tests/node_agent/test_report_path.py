"""The functions between a trainer's socket and the record, and between the conductor and a trainer's socket.

Whoever looks for a fault reads them one by one. A function is on the path if it is on the stack where one of the path's
parts ends; what only takes note of a report, such as an alert, is not.
"""

import asyncio
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType

from tests.cluster.in_process import in_process_cluster
from tests.cluster.run_files import FOREVER, NODE, make_small_assets, small_run
from tests.waiting import HANG_SECONDS

import trainctl.node_agent
from trainctl.protocol import messages as m

MOST_IN, MOST_OUT = 20, 6
STEPS = 20
ROOMS = Path(next(iter(trainctl.node_agent.__path__))).parents[2]
FROM_SOCKET = ("decode_answer", "Session.feed", "Progress.commit", "RunDb.commit", "RecordWriter.put")
ON_ITS_THREAD = "commit.<locals>.write"
CARRIED = {"Session.feed": m.Report, "encode": m.StepPlan}


def stack(frame: FrameType | None) -> list[tuple[str, str]]:
    """Return our functions from this frame outwards, as file and name."""
    ours = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOMS) and "tests" not in file.parts and ".venv" not in file.parts:
            ours.append((file.name, frame.f_code.co_qualname))
        frame = frame.f_back
    return ours


async def test_few_functions_lie_between_a_rank_and_the_record(tmp_path):
    stacks: dict[str, list[list[tuple[str, str]]]] = defaultdict(list)

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and (name in FROM_SOCKET or name in (ON_ITS_THREAD, "encode")):
            carried = [type(value) for value in frame.f_locals.values()]
            if name not in CARRIED or CARRIED[name] in carried:
                stacks[name].append(stack(frame))

    make_small_assets(tmp_path)
    async with in_process_cluster(tmp_path, (NODE,)) as cluster, cluster[NODE].client() as client:
        threading.setprofile(note)  # of the record's thread, which begins with the run
        sys.setprofile(note)
        try:
            await client.send("start-run", {"config": small_run(tmp_path, run__steps=FOREVER)})
            async with asyncio.timeout(HANG_SECONDS):
                while len(stacks[ON_ITS_THREAD]) < STEPS:
                    await asyncio.sleep(0.05)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        await client.send("stop", {"checkpoint": False})
    missing = [name for name in (*FROM_SOCKET, ON_ITS_THREAD, "encode") if not stacks[name]]
    assert not missing
    commits = [whole for whole in stacks["RecordWriter.put"] if ("run_db.py", "RunDb.commit") in whole]
    ends = [*(stacks[name][-1] for name in FROM_SOCKET[:-1]), commits[-1], stacks[ON_ITS_THREAD][-1]]
    way_in = dict.fromkeys(function for end in ends for function in end if function[0] not in ("cli.py",))
    plans = [whole for whole in stacks["encode"] if ("ipc.py", "TrainerLink.send") in whole]
    way_out = dict.fromkeys(plans[-1])

    assert ("ipc.py", "TrainerLink.receive") in way_in and ("session.py", "Session._carry_out") in way_out
    assert len(way_in) <= MOST_IN
    assert len(way_out) <= MOST_OUT
