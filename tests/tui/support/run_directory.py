"""A run directory as a finished run of three nodes leaves it: its record written by the agent's own recorder, at fixed
times."""

from pathlib import Path

import msgspec

from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.replay import format as recordings
from trainctl.node_agent.replay.timeline import Timeline
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import RunStateChanged
from trainctl.protocol.record.paths import RunPaths

STEPS, NODES = 160, 3
BEGAN_AT = 1_763_735_400.0
AWAY = 3


def make(directory: Path, nodes: int = NODES, *, faults: bool = False) -> Path:
    """160 steps of the shipped recording, three of them missing, and a log for each rank."""
    paths = RunPaths(directory)
    paths.logs.mkdir(parents=True)
    timeline = Timeline(recordings.shipped(), directory.name, nodes, faults=faults)
    at = BEGAN_AT
    with RunDb(paths, resumable=False) as recorder:
        for number in range(1, STEPS + 1):
            at += timeline.step_seconds(number)
            if not faults and 100 <= number < 100 + AWAY:
                continue
            played_step = timeline.played_step(number, at)
            first, *others = played_step.parts
            first.values["reward"] = number / STEPS  # a metric that the run brings
            recorder.commit(played_step.step, (first, *others), at)
            for event in played_step.events:
                more = {"step": event.step or None, "verb": event.verb, "outcome": event.outcome}
                recorder.event(at, event.data, event.severity, event.by, **more)
            if played_step.held_out is not None:
                recorder.evaluation(number, at, played_step.held_out, 100.0, 0.5, {"eval/kl": number / 1000})
                recorder.sample(sample(recorder.path.parent.name, number, at))
        recorder.event(at, RunStateChanged("", "finished", step=STEPS), "good", "auto", step=STEPS)
        reading = m.HostReading(
            node=timeline.nodes[0], read_at=at - 20, cpu_percent=91.0, memory_used_bytes=6 * 10**9,
            memory_total_bytes=25 * 10**9, disk_free_bytes=10**11,
        )  # fmt: skip
        recorder.host(reading)
        view = _view(timeline, directory)
        recorder.set_meta("view", msgspec.json.encode(view).decode(), own=True)
    for rank in range(nodes):
        paths.log(rank).write_text(f"rank {rank} began\nleaving: finished\n")
    return directory


def _view(timeline: Timeline, directory: Path) -> m.RunView:
    batch = timeline.global_batch
    return m.RunView(
        run=directory.name, name="demo", state="finished", lead=timeline.nodes[0], engine="gloo",
        generation=m.Generation(1, 1), step=STEPS, steps=STEPS, plan_version=4, global_batch=batch, samples=86_282,
        cursor=STEPS * batch, learning_rate=1e-3, started_at=BEGAN_AT, ranks=timeline.ranks(STEPS, BEGAN_AT),
        directory=str(directory),
    )  # fmt: skip


def sample(run: str, step: int, at: float, prompt: str = "def", answer: str = "") -> m.Sample:
    return m.Sample(
        run=run, step=step, at=at, number=0, prompt=prompt, answer=answer or f"return {step}\n", tokens=4, ended=True,
        seconds=0.2, loss=2.0, eval_loss=None, max_tokens=8, temperature=0.0, top_p=1.0, seed=0, node="studio",
        by="auto",
    )  # fmt: skip
