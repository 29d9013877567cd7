"""The power of a lead's machine, of a follower's and of both goes while a run writes checkpoints: it goes on.

`--schedule-seed` replays the moments of cuts."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import tiers
from tests.asking import run_of
from tests.cluster.run_files import FOREVER, NODE, RING, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.integration.support.clusters import Cluster
from tests.integration.support.reference import one_rank_curve
from tests.waiting import Patience, until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.record.checkpoints import newest_complete, read_manifest

SIZE_BYTES = 64 * 1024 * 1024


class CutDisk:
    """An ext4 file system that is mounted at a folder; use it as a context manager, or `close` it."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image, self.folder, self._device, self._cuts = image, folder, "", 0
        folder.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        self._mount()

    def __enter__(self) -> "CutDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mount(self) -> None:
        self._device = _run("losetup", "--find", "--show", str(self.image))
        with contextlib.ExitStack() as failed:
            failed.callback(self._detach)
            _run("mount", "-t", "ext4", self._device, str(self.folder))
            failed.pop_all()

    def _detach(self) -> None:
        device, self._device = self._device, ""
        if device:
            _run("losetup", "--detach", device)

    def close(self) -> None:
        """Unmount it, even if it is in use, and free its device."""
        if self._device:
            _run("umount", "--lazy", str(self.folder))
            self._detach()

    def restart(self, content: bytes) -> None:
        """Mount what a cut has left in place of what is there. ext4 replays its journal, as after a power cut."""
        self.close()
        self.image.unlink()
        self._cuts += 1
        self.image = self.image.with_suffix(f".{self._cuts}")
        with self.image.open("wb") as file:
            file.truncate(SIZE_BYTES)
            for start in range(0, SIZE_BYTES, 1 << 16):
                if any(piece := content[start : start + (1 << 16)]):
                    file.seek(start)
                    file.write(piece)
        self._mount()


def cut(disks: Sequence[CutDisk]) -> list[bytes]:
    """Return what the disks hold at one moment: two reads of all of them in a row were equal."""
    patience = Patience(30.0)
    before = _read(disks)
    while (now := _read(disks)) != before:
        assert not patience.is_over(), "the disks are never still"
        before = now
    return now


def _read(disks: Sequence[CutDisk]) -> list[bytes]:
    return [disk.image.read_bytes() for disk in disks]


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


def named_after(folder: Path, steps: set[int], seconds: float) -> set[int]:
    """The steps of the checkpoints in a folder as soon as there is one that isn't among `steps`."""
    patience = Patience(seconds)
    while not (found := _steps(folder)) - steps:
        assert not patience.is_over(), "no further checkpoint"
        time.sleep(0.002)
    return found


def _steps(folder: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name.startswith("step-")}
    return set()


CUTS = tiers.scale("power cuts")
SEED = tiers.schedule_seed(11)
LEAD, FOLLOWER = "alpha", "beta"
VICTIMS = ((LEAD,), (FOLLOWER,), (LEAD, FOLLOWER))
EVERY = 25
AFTER_SECONDS = 1.0
"""Half of the cuts come so soon after a checkpoint has its name."""
STEPS_AFTER = 10
TOLERANCE = 1e-6


class CutCluster:
    """A lead and a follower with a disk each, a run of theirs, and all that is left of it after a cut."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        with contextlib.ExitStack() as stack:  # whatever fails, no mount and no loop device is left
            self.disks = {
                node: stack.enter_context(CutDisk(folder / f"{node}.img", folder / "state" / node))
                for node in (LEAD, FOLLOWER)
            }
            self.cluster = Cluster(folder)
            stack.callback(self._end)
            self.cluster.in_touch()
            with self.cluster.client(LEAD) as client:
                begun = client.send("start-run", {"config": config})
                assert begun.state == "applied", begun.reason
                self.run = begun.run
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def _end(self) -> None:
        for node in self.cluster.agents:
            self.power_off(node)

    def checkpoints(self, node: str) -> Path:
        return self.cluster.run_paths(node, self.run).checkpoints

    def processes(self, node: str) -> list[psutil.Process]:
        """All of a node: the agent, the shims, the trainers and their reducers."""
        agent: AgentProcess = self.cluster[node]
        assert agent.process is not None
        found = [psutil.Process(pid) for pid in (agent.process.pid, *agent.trainer_pids()) if psutil.pid_exists(pid)]
        shims = [shim for process in found[1:] if (shim := process.parent()) is not None and shim.pid > 1]
        return [*shims, *found, *(child for process in found for child in process.children(recursive=True))]

    def power_off(self, node: str) -> None:
        """End all processes of a node at once."""
        found = self.processes(node)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.cluster[node].kill()
        psutil.wait_procs(found, 30)

    def cut(self, victims: Sequence[str], after_seconds: float | None, chance: random.Random) -> int:
        """The power goes: `after_seconds` after a checkpoint of the first victim has its name, None: at any moment.
        Gives the step of the newest checkpoint that is complete on a disk which was cut, or on one that was not if that
        is newer."""
        if after_seconds is None:
            time.sleep(chance.uniform(0.0, 3.0))
        else:
            folder = self.checkpoints(victims[0])
            named_after(folder, {int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}, 120)
            time.sleep(after_seconds)
        self._cut_at = time.time()
        for process in [process for node in victims for process in self.processes(node)]:
            process.suspend()  # from here on the others hear nothing of them
        held = cut([self.disks[node] for node in victims])
        for node in victims:
            self.power_off(node)
        for node, content in zip(victims, held, strict=True):
            self.disks[node].restart(content)
        return max(self.newest(node) for node in (LEAD, FOLLOWER))

    def newest(self, node: str) -> int:
        folder = newest_complete(self.checkpoints(node))
        return read_manifest(folder).step if folder is not None else 0

    def goes_on(self, victims: Sequence[str], least: int) -> tuple[int, list[m.StepCommitted]]:
        """Start the agents of the victims: the run must get on, and never go back behind the step `least`. Gives the
        step that it went back to, or stood at if it didn't go back, and the steps of its record."""
        for node in victims:
            self.cluster.start(node)
        self.cluster.in_touch()
        with self.cluster.client(LEAD) as client:
            newest = max((event.id for event in _events(client, self.run) if event.at < self._cut_at), default=0)
            stood = self._stands_at(client)
            until(lambda: _step(client) >= stood + STEPS_AFTER, 120, "steps", lambda: _step(client))
            steps = all_steps(client, self.run)
            later = [event for event in _events(client, self.run) if event.id > newest]
        back = [
            event.step for event in later if getattr(event.data, "after", "") == "resumed" and event.step is not None
        ]
        at = min(back, default=stood)
        assert at >= least, f"went back to step {at}, behind the checkpoint of step {least}"
        return at, steps

    def _stands_at(self, client: BlockingClient) -> int:
        """The step of the run once it makes steps again. A run that has ended is resumed."""

        def running() -> int | None:
            run = run_of(client)
            if run is None or run.state not in m.ACTIVE_RUN_STATES:
                reply = client.send("start-run", {"resume": self.run})
                assert reply.state == "applied", reply.reason
                return None
            return run.step if run.state == "running" else None

        found: int = until(running, 180, "the run after the cut", lambda: run_of(client))
        return found


def _events(client: BlockingClient, run: str) -> list[m.Event]:
    """The newest ones."""
    return list(client.ask(m.EventsRequest, run, limit=500, newest=True).events)


def _step(client: BlockingClient) -> int:
    run = run_of(client)
    assert run is not None and run.state in m.ACTIVE_RUN_STATES, run
    return run.step


@pytest.mark.needs("loop-devices")
@pytest.mark.timeout(600 + 120 * CUTS)
def test_a_run_goes_on_from_its_newest_checkpoint_after_every_power_cut(run_config: Any, tmp_path: Path) -> None:
    chance, failures, curves = random.Random(SEED), list[str](), list[list[m.StepCommitted]]()
    rate = {"optimizer__schedule": "constant", "optimizer__learning_rate": 1e-4}
    config = run_config(
        run__steps=FOREVER, nodes=on(LEAD, FOLLOWER), group={**RING, "first_shares": "even"},
        checkpoint={"every_steps": EVERY, "at_end": False, "keep_last": 3}, **rate,
    )  # fmt: skip
    made: CutCluster | None = None
    try:
        for number in range(CUTS):
            victims = VICTIMS[number % len(VICTIMS)]
            after = chance.uniform(0.0, 0.9 * AFTER_SECONDS) if number % 2 == 0 else None
            try:
                if made is None:
                    made = CutCluster(tmp_path / f"run-{number}", config)
                    named_after(made.checkpoints(LEAD), set(), 120)
                least = made.cut(victims, after, chance)
                at, steps = made.goes_on(victims, least)
                curves.append(steps)
                print(f"cut {number + 1} of {' and '.join(victims)}: on from step {at}, checkpoint {least}", flush=True)
            except AssertionError as error:
                failures.append(f"cut {number + 1} of {' and '.join(victims)}: {str(error).splitlines()[0]}")
                print(failures[-1], flush=True)
                if made is not None:
                    made.close()
                made = None
    finally:
        if made is not None:
            made.close()
    last = max((steps[-1].step for steps in curves), default=0)
    expected = one_rank_curve({**config, "nodes": on(LEAD)}, last) if last else []
    for steps in curves:
        assert [step.step for step in steps] == list(range(1, steps[-1].step + 1))
        worst = max(abs(step.loss - whole.loss) / whole.loss for step, whole in zip(steps, expected, strict=False))
        assert worst <= TOLERANCE, worst
    assert not failures, f"{len(failures)} of {CUTS} cuts: {failures}"


@pytest.mark.needs("loop-devices")
@pytest.mark.timeout(600 + 120 * CUTS)
def test_the_checkpoint_of_a_trainer_without_an_agent_is_resumed_from_after_a_power_cut(
    run_config: Any, tmp_path: Path
) -> None:
    """The steps that its agent has never heard of come from the rank's own record."""
    config = run_config(run__steps=FOREVER)
    with CutDisk(tmp_path / "box.img", tmp_path / "state" / NODE) as disk:
        agent = AgentProcess(tmp_path / "state").start()
        try:
            with agent.client() as client:
                run = client.send("start-run", {"config": config}).run
                wait_for_step(client, 20)
            (trainer,) = agent.trainer_pids()
            agent.kill()
            os.kill(trainer, signal.SIGTERM)
            (step,) = named_after(agent.run_paths(run).checkpoints, set(), 60)
            held = cut([disk])
            until(lambda: not agent.trainer_pids(), what="the trainer's end")
            for content in held:
                disk.restart(content)
            agent.start()
            with agent.client() as client:
                until(lambda: any(found.step > step + 3 for found in all_steps(client, run)), 120, "its resume")
                steps = all_steps(client, run)
                assert not any("lost" in text for text in _notices(client, run))
                client.send("stop", {"checkpoint": False})
                wait_for_end(client)
        finally:
            agent.clean_up()
    whole = one_rank_curve(config, steps[-1].step)
    assert [found.step for found in steps] == list(range(1, len(whole) + 1))
    assert max(abs(found.loss - one.loss) / one.loss for found, one in zip(steps, whole, strict=True)) <= TOLERANCE


def _notices(client: BlockingClient, run: str) -> list[str]:
    return [event.data.text for event in _events(client, run) if isinstance(event.data, Notice)]
