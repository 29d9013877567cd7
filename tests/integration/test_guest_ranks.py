"""Several ranks of one loop carry out each order at one step, or none of them does."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.integration.support.ports import free_addresses
from tests.protocol.support.line_server import LineServer
from tests.tiers import is_soak, scale
from tests.waiting import HANG_SECONDS, until

SCRIPT = Path(__file__).parent / "support" / "guest_rank.py"
LOOPS = ["ddp", "fsdp2", "accelerate", "hf", "lightning"]


class Ranks:
    """The processes of one loop, and the servers in an agent's place: one, or with `alone` one for each rank."""

    def __init__(self, folder: Path, count: int, loop: str, *, alone: bool = False, **variables: str) -> None:
        names = [f"{rank}.sock" for rank in range(count)] if alone else ["guests.sock"]
        self.servers = [LineServer(folder / name).start() for name in names]
        self.server = self.servers[0]
        port = free_addresses(1)[0].rpartition(":")[2]
        common = os.environ | {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TRAINCTL_GUEST_SOCKET": str(folder / "guests.sock"),
            "TRAINCTL_GUEST_STATE": str(folder),
            "OUTPUT": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            **({"ALONE": "1"} if alone else {}),
            **variables,
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), loop],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=(folder / f"{rank}.err").open("w"),
                text=True,
            )
            for rank in range(count)
        ]
        self._folder = folder

    def begun(self, steps: int = 20) -> None:
        """Wait until some steps are recorded."""
        until(lambda: self._check() or all(server.step >= steps for server in self.servers), what="steps")

    def _check(self) -> None:
        for rank, process in enumerate(self.processes):
            assert process.poll() in (None, 0), (self._folder / f"{rank}.err").read_text()[-3000:]

    def end(self) -> None:
        """Have all ranks leave the loop at one step, without an order."""
        (self._folder / "end").touch()

    def ended(self) -> list[dict[str, Any]]:
        """Return what each rank says at its end."""
        outputs = [process.communicate(timeout=HANG_SECONDS)[0] for process in self.processes]
        self._check()
        return [json.loads(output.splitlines()[-1]) for output in outputs]

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()
        for server in self.servers:
            server.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        yield Path(folder)


def random_orders(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield verbs with their arguments; each pause is followed by a resume."""
    chance = Random(seed)
    for _ in range(count):
        verb = chance.choice(["set-lr", "set-lr", "set-lr", "pause", "checkpoint"])
        if verb == "set-lr":
            yield verb, {"value": chance.choice([0.0, chance.uniform(1e-4, 1e-2)]), "schedule": "scale"}
        else:
            yield verb, {}
        if verb == "pause":
            yield "resume", {}


def assert_together(said: list[dict[str, Any]]) -> None:
    first, *others = said
    for other in others:
        for name in ("hash", "rates", "saved"):
            assert other[name] == first[name], f"{name} of ranks {first['rank']} and {other['rank']} differs"


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.tier("soak"))])
@pytest.mark.parametrize("loop", LOOPS)
def test_each_order_is_carried_out_at_one_step_by_all_ranks(folder: Path, loop: str, count: int) -> None:
    ranks = Ranks(folder, count, loop)
    try:
        ranks.begun()
        for verb, arguments in random_orders(1, scale("guest orders")):
            outcome = ranks.server.outcome(ranks.server.order(verb, **arguments))
            assert outcome["state"] == "applied", outcome
        stop = ranks.server.order("stop")
        said = ranks.ended()
        assert_together(said)
        assert len(said[0]["saved"]) >= 1 and len({*said[0]["rates"]}) >= 3
        row = ranks.server.rows[10]
        losses = [part["values"]["own_loss"] for part in row["parts"]]
        assert len(losses) == count and row["loss"] == pytest.approx(sum(losses) / count)
        assert [part["rank"] for part in row["parts"]] == [*range(count)]
        assert row["samples"] == sum(part["samples"] for part in row["parts"]) > row["parts"][0]["samples"]
        assert ranks.server.outcome(stop)["state"] == "applied"
    finally:
        ranks.close()


def test_ranks_that_each_read_for_themselves_drift_apart(folder: Path) -> None:
    """Shows that the check above can fail."""
    ranks = Ranks(folder, 2, "ddp", alone=True)
    try:
        ranks.begun()
        for place in range(20):
            for server in ranks.servers:
                server.order("set-lr", f"order-{place}", value=1e-3 * (place + 1), schedule="scale")
            for server in ranks.servers:
                server.outcome(f"order-{place}")
        ranks.end()
        with pytest.raises(AssertionError, match="differs"):
            assert_together(ranks.ended())
    finally:
        ranks.close()


def test_a_pause_outlasts_the_timeouts_of_collectives(folder: Path) -> None:
    ranks = Ranks(folder, 2, "ddp", COLLECTIVE_SECONDS="2" if is_soak() else "4")
    try:
        ranks.begun()
        assert ranks.server.outcome(ranks.server.order("pause"))["state"] == "applied"
        began, step = time.monotonic(), ranks.server.step
        until(lambda: time.monotonic() - began > scale("guest pause seconds"))
        assert ranks.server.step == step
        assert ranks.server.outcome(ranks.server.order("resume"))["state"] == "applied"
        until(lambda: ranks.server.step > step + 20)
        ranks.server.order("stop")
        assert_together(ranks.ended())
    finally:
        ranks.close()


@pytest.mark.parametrize("seconds", [2.0, pytest.param(13.0, marks=pytest.mark.tier("soak"))])
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_during_an_order_leaves_no_two_ranks_apart(
    folder: Path, stopped: int, seconds: float
) -> None:
    ranks = Ranks(folder, 2, "ddp")
    try:
        ranks.begun()
        for attempt in range(8 if is_soak() else 2):
            order = ranks.server.order("set-lr", value=0.002 * (attempt + 1), schedule="scale")
            time.sleep(0.1 * attempt)
            ranks.processes[stopped].send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            ranks.processes[stopped].send_signal(signal.SIGCONT)
            outcome = ranks.server.outcome(order)
            assert outcome["state"] == "applied" or "rank" in outcome["reason"]
        ranks.end()
        assert_together(ranks.ended())
    finally:
        ranks.close()
