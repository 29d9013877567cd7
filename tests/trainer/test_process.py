"""The trainer as its agent sees it: a process at a socket, ended by a signal, with a cache larger than its memory."""

import argparse
import contextlib
import json
import random
import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.tiers import scale
from tests.trainer.support.process_agent import FIRST, SECOND, THIRD, G, settings
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import checkpoints, log_format
from trainctl.protocol.wire import codec
from trainctl.trainer import demo_assets
from trainctl.trainer.__main__ import GRACE_SECONDS
from trainctl.trainer.checkpoints import files
from trainctl.trainer.data.token_cache import cache_name


def test_a_trainer_outlives_its_agent_and_is_taken_up_by_the_next(agent, run_file):
    run_file(run__orphan_seconds=600.0, nodes__here={"backend": "mlx", "device": "cpu"})
    process = agent.start()
    agent.hear(m.Ready)
    agent.form(FIRST)
    agent.step(1, 1)
    agent.plan(2, 2)
    agent.vanish()
    agent.listen()
    alive = agent.hear(m.Alive, lambda message: message.ready is not None)
    assert alive.generation == FIRST
    assert alive.ready.pid == process.pid
    agent.tell(m.Fence(run="r", generation=SECOND))
    fenced = agent.hear(m.Fenced)
    done = fenced.last_step
    assert [report.step for report in fenced.reports] == list(range(1, done + 1))
    agent.form(THIRD)
    assert agent.step(3, done + 1, THIRD).step == done + 1

    agent.tell(m.Form(run="r", generation=THIRD.next(), engine="gloo", ranks=(0, 1)))
    failed = agent.hear(m.GroupFailed)
    assert failed.reason == "rank 0 has no endpoints open for g1.4", "no reason to end"
    agent.leave(process)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"data__path": "/nowhere"}, "data.path: no such file or folder: /nowhere"),
        ({"batch__micro": 0}, "batch.micro: must be a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line_to_both(agent, run_file, changes, names):
    with contextlib.suppress(InvalidInputError):  # the fixture reads what it wrote
        run_file(**changes)
    process = agent.start()
    failed = agent.hear(m.TrainerFailed)
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert names in failed.reason
    assert failed.reason.startswith(("run file: ", f"{agent.paths.run_file}: "))
    line = log_format.read(errors.removesuffix("\n"))
    assert (line.level, line.text) == ("ERROR", f"rank 0: {failed.reason}")


def test_an_mlx_rank_drops_garbage_trains_and_ends_at_a_term_signal(agent, run_file):
    run_file(nodes__here={"backend": "mlx", "device": "cpu"})
    process = agent.start()
    assert agent.hear(m.Ready).backend == "mlx"
    for frames in ([b"\xc1"], [b""], [codec.encode(m.Leave(run="another", reason=""))], [b"a", b"b"], [b"\x80" * 90]):
        agent.socket.send_multipart([agent.trainer, *frames])
    agent.form(FIRST)
    assert agent.step(1, 1).skipped is None
    agent.step(2, 1, kind="checkpoint", writers=(0,))
    written = agent.hear(m.Checkpointed).checkpoint
    checkpoints.verify(Path(written.path))
    agent.step(3, 2)
    agent.plan(4, 3, global_batch=100_000, work=(m.RankWork(0, (m.Range(2 * G, 100_000),), 1),))
    agent.hear(m.Alive, lambda said: said.phase in ("forward", "backward"))
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    saved = agent.hear(m.Checkpointed, lambda said: said.seq is None)
    assert saved.checkpoint is not None, "it trained alone"
    assert checkpoints.verify(Path(saved.checkpoint.path)).step == saved.step == 2
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 143
    lines = [log_format.read(line) for line in errors.splitlines()]
    assert all(line.level for line in lines), errors
    told = [line.text.split(":")[0] for line in lines if line.level != "INFO"]
    assert told == ["dropped a message from the agent"] * 4, errors
    assert lines[-1].text.startswith("leaving"), errors
    assert not [child for child in children if child.is_running()]


TERMS = scale("terminations")
MOST_STEPS = 5
"""Steps of a life before the one that the signal meets."""


def test_a_trainer_that_is_to_write_a_checkpoint_before_it_leaves_does_so_without_its_group(agent, run_file):
    """As when the lead is gone, and with it the group: the step in flight is given up, and the last one is kept."""
    run_file(nodes__here={"backend": "mlx", "device": "cpu"})
    process = agent.start()
    agent.hear(m.Ready)
    agent.form(FIRST)
    agent.step(1, 1)
    agent.tell(m.Form(run="r", generation=SECOND, engine="gloo", ranks=(0, 1)))
    agent.hear(m.GroupFailed)
    agent.tell(m.Leave(run="r", reason="its lead is gone", checkpoint=True))
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, errors
    assert checkpoints.verify(agent.paths.checkpoint(1)).step == 1


class Lives:
    """One rank's lives, each of which begins with what the one before has left."""

    def __init__(self, agent):
        self.agent, self._chance = agent, random.Random(25)
        self.losses: dict[int, float] = {}
        self.saved = 0
        self.waits: list[float] = []
        """Seconds from each signal to the end of the process."""

    def live(self, number):
        agent, generation = self.agent, m.Generation(1, number)
        process = agent.start(*(["--resume-from", str(self.folder)] if self.saved else []))
        assert agent.hear(m.Ready).last_step == self.saved
        agent.form(generation)
        first, count = self.saved + 1, self._chance.randint(1, MOST_STEPS)
        begun = time.monotonic()
        for step in range(first, first + count):
            self._keep(agent.step(step - first + 1, step, generation))
        step_seconds = (time.monotonic() - begun) / count
        agent.plan(count + 1, first + count, generation)
        time.sleep(self._chance.uniform(0, 1.2 * step_seconds))
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        said = agent.hear(m.Checkpointed, lambda one: one.seq is None)
        _, errors = process.communicate(timeout=HANG_SECONDS)
        self.waits.append(time.monotonic() - begun)
        assert process.returncode == 128 + signal.SIGTERM, errors
        assert said.checkpoint is not None, said.problem
        assert said.step in (first + count - 1, first + count), "the step in flight, or the one before"
        self.saved = checkpoints.verify(Path(said.checkpoint.path)).step
        assert self.saved == said.step

    @property
    def folder(self):
        return self.agent.paths.checkpoint(self.saved)

    def _keep(self, report):
        assert self.losses.setdefault(report.step, report.loss_sum) == report.loss_sum, "made again to another loss"


@pytest.fixture
def lives(agent, tmp_path, run_file):
    here = settings(tmp_path)["nodes"]["here"]
    run_file(run__orphan_seconds=1.0, nodes__here=here | {"backend": "mlx"})
    return Lives(agent)


def in_one_pass(cursor, samples):
    """Make a plan's step one micro-batch of so many samples."""
    return {"cursor": cursor, "global_batch": samples, "work": (m.RankWork(0, (m.Range(cursor, samples),), samples),)}


@pytest.mark.tier("all")
def test_a_long_micro_batch_is_finished_before_the_checkpoint(lives):
    agent, generation = lives.agent, m.Generation(1, 1)
    process = agent.start()
    agent.hear(m.Ready)
    agent.form(generation)
    agent.step(1, 1, generation)
    seconds = agent.step(2, 2, generation, **in_one_pass(G, 40 * G)).step_seconds
    agent.plan(3, 3, generation, **in_one_pass(41 * G, int(1.6 * 40 * G * GRACE_SECONDS / seconds)))
    agent.hear(m.Alive, lambda alive: alive.phase in ("forward", "backward"))
    process.send_signal(signal.SIGTERM)
    assert agent.hear(m.Checkpointed, lambda one: one.seq is None).step == 2
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, errors


@pytest.mark.timeout(600 + 60 * TERMS)
def test_a_term_signal_to_a_rank_that_trains_alone_costs_at_most_the_step_in_flight(lives, new_rig, same_bits):
    for number in range(1, TERMS + 1):
        lives.live(number)
    print(f"\n{TERMS} signals, {lives.saved} steps; seconds to the end: {', '.join(f'{s:.1f}' for s in lives.waits)}")
    rig, state = new_rig("mlx"), files.read(lives.folder).state
    straight = {step: rig.train(step, 5, learning_rate=1e-3).loss_sum for step in range(1, lives.saved + 1)}
    assert lives.losses.items() <= straight.items()
    assert same_bits(rig.backend.copy_out("weights"), state.weights)


CACHE_BYTES = scale("bytes of a large cache")
PRIVATE_BYTES = 600_000_000 if CACHE_BYTES <= 1_000_000_000 else 1_500_000_000
SAMPLE_TOKENS = 400


def write_cache(folder):
    """Samples of equal length whose second half counts; the number of them."""
    samples = CACHE_BYTES // (3 * SAMPLE_TOKENS + 8)
    folder.mkdir(parents=True)
    at_once = 10_000
    for name, one in (
        ("tokens.bin", np.arange(SAMPLE_TOKENS, dtype="<u2") % 200),
        ("counted.bin", np.arange(SAMPLE_TOKENS) >= SAMPLE_TOKENS // 2),
    ):
        with (folder / name).open("wb") as file:
            for begin in range(0, samples, at_once):
                file.write(one.tobytes() * min(at_once, samples - begin))
    (np.arange(samples + 1, dtype="<i8") * SAMPLE_TOKENS).tofile(folder / "offsets.bin")
    notes = {"dtype": "<u2", "digest": "large", "files": [], "has_end": True, "prompt_end": 0, "remarks": {}}
    (folder / "cache.json").write_text(json.dumps(notes), "utf-8")
    return samples


@pytest.mark.tier("all")
@pytest.mark.needs("linux")  # only Linux limits a process's private memory
def test_a_cache_larger_than_memory_is_trained_on(agent, run_file, tmp_path):
    source = tmp_path / "samples.jsonl"
    source.write_text('{"tokens": [1, 2]}\n', "utf-8")
    config = run_file(data__path=str(source), data__kind="samples", data__sequence_length=512)
    folder = agent.paths.node_data / cache_name(config)
    samples = write_cache(folder)
    process = agent.start()
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (PRIVATE_BYTES, PRIVATE_BYTES))
    ready = agent.hear(m.Ready)
    assert ready.samples + ready.held_out == samples
    agent.form(FIRST)
    for step in (1, 2, 3):
        assert agent.step(step, step).weight == 12 * SAMPLE_TOKENS / 2
    status = Path(f"/proc/{process.pid}/status").read_text("ascii")
    found = re.search(r"VmData:\s+(\d+) kB", status)
    assert found is not None and int(found[1]) * 1024 <= PRIVATE_BYTES < CACHE_BYTES
    agent.leave(process)
    (folder / "tokens.bin").unlink()
    (folder / "counted.bin").unlink()


def test_a_pair_differs_in_one_line_that_is_backwards(tmp_path, monkeypatch):
    library = {module.__name__: [Path(module.__file__)] for module in (random, argparse)}
    monkeypatch.setattr(demo_assets, "_standard_library", lambda: library)
    source = tmp_path / "pairs"
    assert demo_assets.make_functions(source, demo_assets.preferences) > 20
    pairs = [json.loads(line) for line in (source / "functions.jsonl").read_text("utf-8").splitlines()]
    for pair in pairs:
        chosen, rejected = (pair[half].split("\n") for half in ("chosen", "rejected"))
        ((whole, broken),) = [both for both in zip(chosen, rejected, strict=True) if both[0] != both[1]]
        assert whole.strip() == broken.strip()[::-1].strip()
        assert pair["prompt"].startswith("def ") and pair["prompt"].endswith(":\n")
        assert len(pair["prompt"]) + len(pair["chosen"]) <= 181
