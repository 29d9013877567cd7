"""Examples of every message: the golden byte vectors in tests/golden/wire.jsonl and the bytes in docs/protocol*.md.

`python -m tools.protocol_docs.examples` writes the vectors. A version's vectors change only when its version does.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec

from tools.protocol_docs import generated
from trainctl.protocol import messages as m
from trainctl.protocol.batch.run_rates import run_rates
from trainctl.protocol.calibration import profile
from trainctl.protocol.config.prompts import ChatMessage
from trainctl.protocol.messages import events
from trainctl.protocol.wire import codec

_RUN, _BOOT, _AT = "sft-1b-20261120-143107-9f3c", "5f3a9c0de1b24786", 1795185067.25
_ID, _RID = "6c1e4f0a-52d3-4b8e-9a77-0d3c5be2f914", "0f8b2c6d4e1a49d7a3c5b7e9f1d20364"
_GENERATION = m.Generation(1, 4)
_PHASES = m.Phases(data=0.004, forward=0.31, backward=0.62, sync=0.05, optimizer=0.02, wait=0.001)
_GIGABYTE = 10**9

_PLAN = m.StepPlan(
    run=_RUN, generation=_GENERATION, seq=128, kind="train", step=121, plan_version=3, cursor=2880, global_batch=24,
    work=(
        m.RankWork(rank=0, ranges=(m.Range(2880, 16),), micro_batch=8),
        m.RankWork(rank=1, ranges=(m.Range(2896, 8),), micro_batch=4),
    ),
    learning_rate=0.00162, divisor=4096.0, finishes=m.Generation(1, 3), commands=(_ID,),
)  # fmt: skip
_COMPUTE = m.Compute("bfloat16", None, "off", "sdpa")
_PASSES = (profile.Pass(1, 0.0155, 431_067_136), profile.Pass(2, 0.0304, 440_844_288), profile.Pass(4, 0.0575, None))
_PROFILE = profile.DeviceProfile(
    key=profile.ProfileKey(
        device="cpu", model_digest="b" * 64, sequence_length=128, dtype="float32", backend="torch",
        backend_version="2.13.0", trainctl_version="0.1.0", settings="1457c2fc944b04dd",
    ),
    created_at=_AT, duration_seconds=38.5, passes=_PASSES, out_of_memory_micro=8,
    grid=(profile.GridPoint(2, 12, 0.389), profile.GridPoint(4, 6, 0.3)), optimizer_seconds=0.00125,
    matmul=(profile.MatmulRate("float32", 103.9, 52.1),), memory_bytes_per_second=2.8e10,
    memory_cap_bytes=16 * _GIGABYTE, disk=profile.DiskRate(412_000_000.0, 1_900_000_000.0),
    data=profile.DataRate(13_646.0, 7_772.0), forward=(profile.Pass(1, 0.0052, 402_653_184),), beside=("studio-b",),
    links=(profile.LinkRate("mbp", 1.1e9, 1.0e9, 0.0003),),
)  # fmt: skip
_READY = m.Ready(
    run=_RUN, rank=0, pid=4711, backend="torch", device="cpu", parameters=833_408, samples=81_920, held_out=820,
    mean_weight=128.0, layout_digest="a" * 64, model_digest="b" * 64, data_digest="c" * 64, last_step=120,
    cursor=2880, memory_cap_bytes=16 * _GIGABYTE, system="Linux", engines=("gloo", "ring"),
    model_files=(m.FileDigest("config.json", "d" * 64), m.FileDigest("model.safetensors", "e" * 64)),
    data_files=(m.FileDigest("stdlib.txt", "f" * 64),), compute=_COMPUTE,
    profile=profile.summary(_PROFILE),
)  # fmt: skip
_MEMORY = {"memory_bytes": 1.0 * _GIGABYTE, "memory_cap_bytes": 16.0 * _GIGABYTE}
_REPORT = m.Report(
    run=_RUN, rank=0, generation=_GENERATION, seq=128, kind="train", step=121, loss_sum=6604.8, weight=3072.0,
    own_weight=2048.0, own_samples=16, tokens=3072, own_tokens=2048, grad_norm=0.71, micro_batch=8, replays=0,
    phases=_PHASES, step_seconds=1.005, finished_at=_AT, values={"own_loss": 2.17, **_MEMORY},
)  # fmt: skip
_LINK = "9b1d5a7c3e2f4860"
_HOSTED = m.HostedRank(run=_RUN, rank=1, pid=4712)
_RANK = m.RankView(
    rank=0,
    node="studio",
    state="run",
    since_at=_AT,
    share=16,
    micro_batch=8,
    backend="torch",
    device="cpu",
    pid=4711,
    compute=_COMPUTE,
)
_VIEW = m.RunView(
    run=_RUN, name="sft-1b", state="running", lead="studio", engine="gloo", generation=_GENERATION, step=121,
    steps=60_000, plan_version=3, global_batch=24, samples=81_920, cursor=2904, learning_rate=0.00162,
    started_at=_AT - 400, ranks=(_RANK,), directory=f"/var/lib/trainctl/studio/runs/{_RUN}", eval_loss=1.903,
    eval_step=100, policies=(m.PolicyView("out-of-memory", "on"), m.PolicyView("first-shares", "advise")), boot=_BOOT,
    seq=901,
)  # fmt: skip
_STEP = m.StepCommitted(
    run=_RUN, generation=_GENERATION, step=121, committed_at=_AT, loss=2.15, weight=3072.0, samples=24,
    learning_rate=0.00162, grad_norm=0.71, cursor=2904, global_batch=24, plan_version=3, step_seconds=1.005,
    tokens_total=371_712.0, tokens=3072, weight_total=371_712.0, seconds_total=121.6, boot=_BOOT, seq=902,
)  # fmt: skip
_RANK_STEP = m.RankStep(
    run=_RUN, generation=_GENERATION, step=121, rank=0, node="studio", tokens=2048.0, samples=16, micro_batch=8,
    replays=0, step_seconds=1.005, phases=_PHASES, weight=2048.0, values={"own_loss": 2.17, **_MEMORY},
    boot=_BOOT, seq=903,
)  # fmt: skip
_DIAGNOSIS = m.Diagnosis(
    at=_AT, step=121, first_step=98, step_seconds=1.02,
    findings=(
        m.Finding(
            cause="quota", title="mbp is stopped by its CPU quota", severity="warning", node="mbp", rank=1,
            evidence=("in 62 % of the quota's periods it was used up",), ruled_out=("disk: I/O pressure 0 %",),
            what_if=m.WhatIf(1.02, 0.81, "without the quota a step takes 0.81 s, not 1.02 s"),
            remedies=(m.Remedy("move samples to other ranks", "trainctl send rebalance auto=true", "rebalance"),),
        ),
    ),
    checked=(m.CheckedCause("quota", "found", "62 %"), m.CheckedCause("swap", "unknown", "swap of mbp")),
)  # fmt: skip
_HOST = m.HostReading(
    node="studio", read_at=_AT, cpu_percent=93.5, memory_used_bytes=9 * _GIGABYTE, memory_total_bytes=64 * _GIGABYTE,
    disk_free_bytes=512 * _GIGABYTE, disk_total_bytes=2000 * _GIGABYTE, load_1min=7.9, boot=_BOOT, seq=904,
    energy_joules=221_400.0, energy_since_at=_AT - 3600, energy_gap_seconds=3.5, values={"round_trip_seconds": 0.0021},
    gpus=(m.GpuReading(name="Apple M2 Ultra", utilization_percent=89.0, clock_mhz=1398.0, power_watts=61.5),),
    processes=(
        m.ProcessReading(pid=611, role="agent", cpu_percent=1.5, memory_bytes=54_000_000),
        m.ProcessReading(pid=4711, role="trainer", rank=0, cpu_percent=98.0, memory_bytes=_GIGABYTE),
    ),
)  # fmt: skip
_SAMPLING = m.Sampling(("Once upon a time", (ChatMessage("user", "Why?"),)), 128, 0.8, 0.95, 7)
_PAIR = m.EvaluatedPair(7, 0.41, -0.12, "2+2?", "4", "5")
_FORWARD = m.PhaseProfile(
    "forward", 0.84, 0.0, (m.OperatorTime("aten::mm", 84, 0.61, 0.0), m.OperatorTime("aten::add", 240, 0.05, 0.0))
)
_PAIRS = m.HeldOutPairs(120, 1_770_000_200.0, (_PAIR,))
_SAMPLE = m.Sample(
    run=_RUN, step=121, at=_AT, number=0, prompt="Once upon a time", answer=" there was a loop.", tokens=6, ended=True,
    seconds=0.42, loss=2.15, eval_loss=2.31, max_tokens=128, temperature=0.8, top_p=0.95, seed=7, node="studio",
    by="anna", boot=_BOOT, seq=906,
)  # fmt: skip
_EVENT = m.Event(
    id=17, at=_AT, severity="info", by="anna", run=_RUN, step=121, generation=_GENERATION, command=_ID,
    verb="resize-batch", outcome="applied", boot=_BOOT, seq=905,
    data=events.MicroBatchChanged(before=(("studio", 8),), after=(("studio", 4),)),
)  # fmt: skip
_EVENT_DATA: tuple[events.AnyEvent, ...] = (
    events.SharesChanged(
        before={"studio": 16, "mbp": 8},
        after={"studio": 9, "mbp": 15},
        cause="initial shares by measured samples per second: studio 21/s, mbp 35/s",
    ),
    events.MicroBatchChanged(before=(("studio", 8),), after=(("studio", 4),), cause="out of memory"),
    events.LearningRateChanged(before=0.0003, after=0.0001, schedule="scale"),
    events.GlobalBatchChanged(before=24, after=48, schedule="set"),
    events.LeadChanged(before="studio", after="mbp", term=2),
    events.RunStateChanged(before="running", after="paused"),
    events.RunBranched(
        parent="sft-1b-20261119-110000-3f1c", step=120, branch="sft-1b-20261120-093000-a07e", node="studio"
    ),
    events.NodeStateChanged(node="mbp", before="lost", after="drained"),
    events.PolicyModeChanged(name="first-shares", before="on", after="advise", cause="anna sent rebalance"),
    events.PolicyAdvised(
        name="first-shares",
        command="rebalance studio=16 mbp=8",
        reason="initial shares by measured samples per second: studio 210/s, mbp 104/s",
    ),
    events.PolicyActed(name="non-finite", command="pause", reason="3 steps in a row were not finite"),
    events.CommandApplied(node="mbp", result="restarted; it will rejoin when its model is loaded"),
    events.CommandFailed(reason="99 is over studio's share of 16 samples", field="micro", node="studio"),
    events.NoteWritten(text="the fan of mbp is loud"),
    events.GenerationFormed(
        generation=_GENERATION,
        count=2,
        ranks=(0, 1),
        engine="ring",
        behind=("mbp",),
        source="studio",
        waited_seconds=1.9,
    ),
    events.GenerationLeft(generation=_GENERATION, reason="mbp left: its trainer ended"),
    events.StepSkipped(step=121, reason="nan"),
    events.StepRetracted(step=121),
    events.StepsStopped(lacking="1 of 3 nodes is in reach, 2 are needed"),
    events.StateShared(source="studio", drift=1.3e-7, rank="mbp"),
    events.ProbePassed(rank="mbp", other="studio", difference=2.1e-6, tolerance=1e-4, tokens=256, seconds=0.4),
    events.Evaluated(loss=2.31, seconds=1.9),
    events.Sampled(node="studio", prompts=2, tokens=57, seconds=1.4),
    events.SampleFailed(node="mbp", reason="sample failed: prompt has 9000 tokens; the model's context has 8192"),
    events.CheckpointWritten(step=120, size_bytes=82_100_000, loop_seconds=0.014),
    events.CheckpointFailed(node="mbp", reason="no space left on device"),
    events.RankChanged(ranks=("mbp",), state="restarted", detail="1 of 5"),
    events.SharesUnmeasured(nodes=("mbp",)),
    events.NodeState(node="mbp", state="silent", detail="no heartbeat for 5 s"),
    events.AlertRaised(id="clock:mbp:1", node="mbp", text="+142 ms in backward: 84 °C, 1.62→1.38 GHz"),
    events.AlertCleared(id="clock:mbp:1", node="mbp", alert="clock", seconds=180.0),
    events.AlertFailed(text="the hook hooks/page.sh exited with status 1"),
    events.RecordState(problem="the disk is full"),
    events.Notice(text="taken up again without mbp"),
    events.CheckpointCopied("mbp", 120, "backup@host:runs", 4.2),
    events.Profiled(
        node="studio",
        rank=0,
        first_step=122,
        last_step=124,
        file="rank-0.steps-122-124.trace.json.gz",
        size_bytes=1_204_300,
        digest="b7" * 32,
        phases=(_FORWARD,),
        loop_seconds=0.041,
    ),
    events.ProfileFailed("mbp", "its trainer ended before the trace was written"),
    events.SetupChanged(step=120, changes=("mbp: torch instead of mlx, device cpu instead of device gpu",)),
)
"""One of each kind of event."""
_ALERTS = m.Alerts(
    node="studio", boot=_BOOT, seq=906,
    alerts=(
        m.AlertView(
            id="clock:mbp:1", kind="clock", severity="warning", node="mbp", rank=1, step=121, raised_at=_AT,
            text="+142 ms in backward: 84 °C, 1.62→1.38 GHz", facts=("backward 620→762 ms", "temperature 71→84 °C"),
        ),
        m.AlertView(
            id="stall", kind="stall", severity="error", text="no step since step 121", raised_at=_AT + 71,
            acknowledged_by="anna",
        ),
    ),
    mutes=(m.MuteView(kind="disk", node=None, until_at=_AT + 3600, by="anna"),),
)  # fmt: skip
_SERIES = m.Series(
    metric="loss", rank=None, bucket_steps=10, steps=(1, 11, 31), minimum=(4.1, 3.0, 2.4), maximum=(5.5, 4.0, 2.9),
    mean=(4.8, 3.5, 2.6), last=(4.1, 3.0, 2.5),
)  # fmt: skip

_WORK = "5f0c9a77b1d2"
_WORK_VIEW = m.WorkView(
    work=_WORK, kind="log-probabilities", run=_RUN, checkpoint=120, state="running", rows=2, answered=1,
    received_bytes=37, nodes=(
        m.WorkNode("studio", "working", "torch cuda:0", rows=1, rows_per_second=40.5),
        m.WorkNode("mbp", "silent", why="no message for 8 s"),
    ),
)  # fmt: skip
_REFERENCE = f"reference-{'0f' * 16}"
_SLICE = m.WorkSlice(run=_WORK, slice=1, first=1, rows=('{"text":"and two"}',))

_STATUS = m.PolicyStatus(
    name="micro-batch", mode="on",
    figures=(m.PolicyFigure("highest peak memory, mean of 10 steps", 0.93, 0.9, "part"),),
    command="resize-batch micro=6 --node studio",
    why="mean peak memory over 10 steps: 93 % of the cap; target 90 %",
)  # fmt: skip

EXAMPLES: dict[str, dict[str, m.Message]] = {
    "client to agent": {
        "snapshot-request": m.SnapshotRequest(rid=_RID, columns=120),
        "history-request": m.HistoryRequest(rid=_RID, run=_RUN, metrics=("loss", "wait_seconds"), last_step=121),
        "gap-request": m.GapRequest(rid=_RID, boot=_BOOT, first_seq=880, last_seq=901),
        "runs-request": m.RunsRequest(rid=_RID),
        "events-request": m.EventsRequest(rid=_RID, run=_RUN, limit=100, newest=True),
        "steps-request": m.StepsRequest(rid=_RID, after_step=100),
        "samples-request": m.SamplesRequest(rid=_RID, after_row=12),
        "pairs-request": m.PairsRequest(rid=_RID, limit=5),
        "traces-request": m.TracesRequest(rid=_RID, run=_RUN),
        "trace-request": m.TraceRequest(
            rid=_RID, run=_RUN, node="mbp", file="rank-1.steps-122-124.trace.json.gz", offset_bytes=61_440
        ),
        "diagnosis-request": m.DiagnosisRequest(rid=_RID, run=_RUN, last_step=120),
        "policies-request": m.PoliciesRequest(rid=_RID),
        "hosts-request": m.HostsRequest(rid=_RID, after_row=40),
        "log-request": m.LogRequest(rid=_RID, rank=0, offset_bytes=-4096),
        "attend-request": m.AttendRequest(rid=_RID, viewer=_ID, by="anna"),
        "facts-request": m.FactsRequest(rid=_RID),
        "digests-request": m.DigestsRequest(rid=_RID, what="model", path="/models/sft-1b"),
        "disk-request": m.DiskRequest(rid=_RID, folder="/fast/tokens"),
        "calibrate-request": m.CalibrateRequest(
            rid=_RID, calibration="calibration-7f3c", config={"run": {"name": "sft-1b", "steps": 1000}}, lead="studio"
        ),
        "profiles-request": m.ProfilesRequest(rid=_RID, limit=8),
        "link-request": m.LinkRequest(rid=_RID, node="mbp", token="7f" * 16),
        "audit-request": m.AuditRequest(rid=_RID),
        "attach-run": m.AttachRun(
            rid=_RID, run="ppo-7", name="ppo", started_at=_AT, steps=1000,
            ranks=(m.GuestRank(0, backend="jax", device="tpu", pid=4713), m.GuestRank(1, node="mbp", micro_batch=4)),
        ),
        "run-steps": m.RunSteps(
            rid=_RID, run="ppo-7", steps=(
                m.GuestStep(
                    step=12, committed_at=_AT, step_seconds=0.5, samples=8, tokens=600, weight=512.0, loss=2.5,
                    learning_rate=1e-4,
                    values={"user:reward": 0.25}, parts=(
                        m.GuestPart(0, 450.0, 384.0, 6, step_seconds=0.4, phases=m.Phases(forward=0.1, backward=0.3)),
                        m.GuestPart(1, 150.0, 128.0, 2, 4, values={"user:kl": 0.5}),
                    ),
                ),
            ),
        ),
        "end-run": m.EndRun(rid=_RID, run="ppo-7", state="failed", reason="out of prompts"),
        "works-request": m.WorksRequest(rid=_RID),
        "open-work": m.OpenWork(
            rid=_RID, work=_WORK, kind="log-probabilities", run=_RUN, rows=2, size_bytes=37, digest="a" * 64,
            nodes=("studio", "mbp"), file="test.jsonl",
        ),
        "open-work-answers": m.OpenWork(
            rid=_RID, work=_WORK, kind="answers", run=_RUN, rows=2, size_bytes=37, digest="a" * 64, best=True,
            options=m.AnswerOptions(max_tokens=64, temperature=0.7, top_p=0.9, seed=3),
        ),
        "work-rows": m.WorkRows(
            rid=_RID, work=_WORK, offset_bytes=0, data=b'{"text":"one"}\n{"text":"and two"}\n'
        ),
        "work-results-request": m.WorkResultsRequest(rid=_RID, work=_WORK, after_row=1),
        "end-work": m.EndWork(rid=_RID, work=_WORK),
        "host-work": m.HostWork(
            rid=_RID, work=_WORK, kind="log-probabilities", run=_RUN, lead="studio",
            config={"run": {"name": "sft-1b", "steps": 60_000}, "batch": {"global": 24}}, checkpoint=120,
            files={"adapter_model.safetensors": "b" * 64},
        ),
        "work-file-request": m.WorkFileRequest(
            rid=_RID, work=_WORK, name="adapter_model.safetensors", offset_bytes=61_440
        ),
        "slice-request": m.SliceRequest(
            rid=_RID, work=_WORK, node="mbp", state="idle", device="mlx gpu Apple M2 Max", answered=0,
            results=(b'{"logprob": -3.5, "tokens": 2, "mean": -1.75}',),
        ),
        "slice-request-gone": m.SliceRequest(
            rid=_RID, work=_WORK, node="mbp", state="gone", problem="the worker got signal 9"
        ),
        "command": m.Command(
            rid=_RID, id=_ID, verb="resize-batch", args={"micro": 4}, by="anna", node="studio", run=_RUN, if_plan=2,
            issued_at=_AT, ttl_seconds=30.0,
        ),
        "command-bare": m.Command(rid=_RID, id=_ID, verb="checkpoint"),
    },
    "agent to client": {
        "snapshot": m.Snapshot(
            rid=_RID, boot=_BOOT, seq=905, at=_AT, run=_VIEW, last_step=_STEP, rank_steps=(_RANK_STEP,),
            events=(_EVENT,), series=(_SERIES,),
            node=m.NodeView(
                node="studio", boot=_BOOT, address="tcp://127.0.0.1:7474", live_address="tcp://127.0.0.1:7475",
                host=_HOST, version="0.1.0",
            ),
            peers=(
                m.PeerView(
                    node="mbp", address="tcp://127.0.0.1:7484", live_address="tcp://127.0.0.1:7485",
                    state="connected", since_at=_AT - 400,
                ),
            ),
            alerts=_ALERTS,
        ),
        "history": m.History(rid=_RID, series=(_SERIES,)),
        "gap-fill": m.GapFill(rid=_RID, complete=True, messages=(_STEP, _RANK_STEP)),
        "runs": m.Runs(
            rid=_RID,
            runs=(
                m.RunSummary(
                    run=_RUN, name="sft-1b", state="running", step=121, steps=60_000, last_loss=2.15,
                    started_at=_AT - 400, directory=_VIEW.directory, lead="studio", nodes=("studio",),
                    last_step_at=_AT - 1, cursor=2904, rates=run_rates(_VIEW, _STEP),
                    cost=m.RunCost(currency="USD", spent=0.278, at=_AT, per_hour=2.5, unpriced=("mbp",)),
                ),
            ),
        ),
        "run-kept": m.RunKept(
            rid=_RID, run="ppo-7", step=12, directory="/var/lib/trainctl/studio/runs/ppo-7"
        ),
        "events": m.Events(rid=_RID, run=_RUN, events=(_EVENT,), more=False),
        "steps": m.Steps(rid=_RID, run=_RUN, steps=(_STEP,), more=True),
        "pairs": m.Pairs(rid=_RID, run=_RUN, evaluations=(_PAIRS,)),
        "traces": m.Traces(rid=_RID, run=_RUN, profiles=()),
        "trace-part": m.TracePart(rid=_RID, offset_bytes=61_440, size_bytes=61_444, data=b"\x00\x01\x02\x03"),
        "policies": m.Policies(rid=_RID, run=_RUN, step=121, policies=(_STATUS,)),
        "diagnosis": m.DiagnosisReply(rid=_RID, run=_RUN, live=True, diagnosis=_DIAGNOSIS),
        "samples": m.Samples(rid=_RID, run=_RUN, samples=(_SAMPLE,), last_row=13, more=False),
        "hosts": m.Hosts(rid=_RID, run=_RUN, readings=(_HOST,), last_row=41, more=True),
        "log-part": m.LogPart(rid=_RID, run=_RUN, rank=0, offset_bytes=8192, size_bytes=8204, text="model loaded"),
        "viewers": m.Viewers(rid=_RID, viewers=(m.Viewer(by="cron", since_at=_AT - 400, read_only=True),)),
        "facts": m.Facts(
            rid=_RID, node="studio", received_at=_AT, at=_AT + 0.04, version="0.1.0", python="3.12.7", system="Darwin",
            release="25.1.0", machine="arm64", libraries={"mlx": "0.32.0", "pyzmq": "27.1.0"},
            environment={"OMP_NUM_THREADS": "8"}, keys_folder="/Users/anna/Library/Application Support/trainctl/keys",
            key_files=(
                m.FileFacts(
                    path="/Users/anna/Library/Application Support/trainctl/keys/agent.toml", mode=0o600, is_own=True
                ),
            ),
            state_folder="/Users/anna/Library/Application Support/trainctl/studio", disk_free_bytes=512 * _GIGABYTE,
            disk_total_bytes=2000 * _GIGABYTE, memory_total_bytes=192 * _GIGABYTE, memory_limit_bytes=None,
            open_files=65_536,
            interfaces=(m.InterfaceFacts(name="en5", is_up=True, addresses=("10.0.7.1/24",)),), on_battery=False,
            battery_percent=None, lid_closed=None, cpu_count=24, boot="7D2C9E0A-51B4-4C0F-8E57-3F2B6A1D9C40",
        ),
        "digests": m.Digests(
            rid=_RID, digest="b" * 64,
            files=(m.FileDigest("config.json", "d" * 64), m.FileDigest("model.safetensors", "e" * 64)),
        ),
        "digests-problem": m.Digests(rid=_RID, digest="", problem="/models/sft-1b: no such file or folder"),
        "disk": m.Disk(
            rid=_RID, folder="/fast/tokens", write_bytes_per_second=412_000_000.0, read_bytes_per_second=1_900_000_000.0
        ),
        "calibration": m.Calibration(
            rid=_RID, state="finished", progress=("micro-batch 1: 64.3 samples/s",), profile=_PROFILE
        ),
        "calibration-problem": m.Calibration(rid=_RID, state="failed", problem="no micro-batch could be measured"),
        "profiles": m.Profiles(rid=_RID, profiles=(_PROFILE,)),
        "link-reply": m.LinkReply(rid=_RID, port=40_123, bytes_per_second=112_000_000.0),
        "works": m.Works(
            rid=_RID, works=(
                m.WorkSummary(
                    "studio", _WORK_VIEW, "test.jsonl", slices=2, slices_answered=1, rows_per_second=40.5,
                    seconds_left=0.025,
                ),
            ),
        ),
        "work-status": m.WorkStatus(
            rid=_RID, view=_WORK_VIEW, results=(b'{"logprob": -3.5, "tokens": 2, "mean": -1.75}',),
        ),
        "work-hosted": m.WorkHosted(rid=_RID, problem="mbp takes part in a run"),
        "work-file-part": m.WorkFilePart(rid=_RID, data=b"\x00\x01"),
        "slice-reply": m.SliceReply(rid=_RID, slice=1, first=1, rows=('{"text":"and two"}',)),
        "slice-reply-ended": m.SliceReply(rid=_RID, ended=True),
        "command-reply": m.CommandReply(
            rid=_RID, id=_ID, state="applied", step=121, before="studio=8", after="studio=4", plan_version=3, run=_RUN
        ),
        "command-reply-rejected": m.CommandReply(
            rid=_RID, id=_ID, state="rejected", reason="64 is over studio's share of 16 samples", field="micro"
        ),
        "audit": m.Audit(
            rid=_RID,
            refused=(
                m.Refused(
                    first_at=1763600000.5, last_at=1763600003.25, count=2, name="anna@mbp",
                    key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", what="command pause",
                    why="anna@mbp is a viewer here; only an operator may send command pause",
                ),
            ),
        ),
        "refusal": m.Refusal(rid=_RID, code="unknown-run", text="run: no run 'sft-2b' on this node"),
        "refusal-not-lead": m.Refusal(
            rid=_RID, code="not-lead", text="studio conducts this run", lead="tcp://127.0.0.1:7474"
        ),
        "refusal-not-authorised": m.Refusal(
            rid=_RID, code="not-authorised",
            text="anna@mbp is a viewer here; only an operator may send command pause",
        ),
    },
    "published by an agent": {
        "run-view": _VIEW,
        "step-committed": _STEP,
        "step-committed-nan": msgspec.structs.replace(_STEP, loss=float("nan"), skipped="nan"),
        "rank-step": _RANK_STEP,
        "host-reading": _HOST,
        "sample": _SAMPLE,
        "event": _EVENT,
        **{
            f"event-{data.__struct_config__.tag}": msgspec.structs.replace(
                _EVENT, data=data, by="auto", command=None, verb=None, outcome=None
            )
            for data in _EVENT_DATA
        },
        "alerts": _ALERTS,
        "heartbeat": m.Heartbeat(
            node="studio", at=_AT, step_age_seconds=0.4, loop_lag_seconds=0.0008, boot=_BOOT, seq=905
        ),
    },
    "agent to trainer": {
        "step-plan": _PLAN,
        "step-plan-checkpoint": msgspec.structs.replace(
            _PLAN, kind="checkpoint", work=(), finishes=None, writers=(0,), commands=()
        ),
        "step-plan-sample": msgspec.structs.replace(
            _PLAN, kind="sample", finishes=None, commands=(), work=_PLAN.work[:1], sampling=_SAMPLING
        ),
        "step-plan-defragment": msgspec.structs.replace(
            _PLAN, kind="defragment", finishes=None, work=(m.RankWork(0, (), 8),), learning_rate=0.0
        ),
        "step-plan-profile": msgspec.structs.replace(
            _PLAN, kind="profile", finishes=None, work=(m.RankWork(0, (), 8),), learning_rate=0.0, profile_steps=3
        ),
        "step-plan-probe": msgspec.structs.replace(_PLAN, kind="probe", finishes=None, commands=()),
        "reference-slice": m.ReferenceSlice(
            run=_RUN, ask=7, reference=_REFERENCE, slice=1, first=1, units=1, offset=0,
            values=struct.pack("<2f", -1.5, -0.25), answered=1,
        ),
        "reference-slice-complete": m.ReferenceSlice(
            run=_RUN, ask=9, reference=_REFERENCE, offset=5, answered=2, digest="d" * 64
        ),
        "reference-slice-unknown": m.ReferenceSlice(run=_RUN, ask=1, reference=_REFERENCE, known=False),
        "reference-slice-problem": m.ReferenceSlice(
            run=_RUN, ask=7, reference=_REFERENCE, problem="studio can't keep them: No space left on device"
        ),
        "offer": m.Offer(run=_RUN, generation=_GENERATION, engine="gloo"),
        "form": m.Form(run=_RUN, generation=_GENERATION, engine="none", ranks=(0,)),
        "form-group": m.Form(
            run=_RUN, generation=_GENERATION, engine="gloo", ranks=(0, 1), layout_digest="a" * 64, step=120,
            endpoints=(("127.0.0.1:50211",), ("127.0.0.1:50212",)), cursor=2880, source=0, behind=(1,),
        ),
        "fence": m.Fence(run=_RUN, generation=_GENERATION.next()),
        "leave": m.Leave(run=_RUN, reason="the run was stopped"),
        "work-slice": _SLICE,
    },
    "trainer to agent": {
        "ready": _READY,
        "alive": m.Alive(
            run=_RUN, rank=0, generation=_GENERATION, step=121, phase="backward", progress=2904, ready=_READY
        ),
        "alive-unformed": m.Alive(run=_RUN, rank=0, generation=None, step=0, phase="starting"),
        "alive-loading": m.Alive(
            run=_RUN, rank=0, generation=None, step=0, phase="starting", progress=12, detail="tokenizing 45% of 1.2 GB"
        ),
        "sealed": m.Sealed(run=_RUN, rank=0, chunks=3, samples=3072, digest="a" * 64),
        "sealed-ended": m.Sealed(run=_RUN, rank=0, chunks=4, samples=3500, digest="b" * 64, ended=True),
        "reference-ask": m.ReferenceAsk(
            run=_RUN, rank=1, ask=7, reference=_REFERENCE, wants=True, offset=2, slice=0, first=0, units=1,
            values=(struct.pack("<2f", -1.5, -0.25),),
        ),
        "reference-ask-sizes": m.ReferenceAsk(
            run=_RUN, rank=1, ask=1, reference=_REFERENCE, wants=True, offset=0,
            counts=struct.pack("<2I", 2, 3), tokens=struct.pack("<2I", 9, 12), digest="c" * 64,
        ),
        "soon": m.Soon(run=_RUN, rank=0, generation=_GENERATION, seq=128),
        "checkpoint-progress": m.CheckpointProgress(
            run=_RUN, rank=0, step=120, done_bytes=6_291_456, total_bytes=19_800_000
        ),
        "checkpointed": m.Checkpointed(
            run=_RUN, rank=0, generation=_GENERATION, seq=129, step=120,
            checkpoint=m.CheckpointInfo(
                f"{_VIEW.directory}/checkpoints/step-120", 120, 9_900_000, 0.004, 0.061, (110, 120)
            ),
        ),
        "checkpointed-failed": m.Checkpointed(
            run=_RUN, rank=0, generation=_GENERATION, seq=129, step=120,
            problem="checkpoint failed: [Errno 28] No space left on device",
        ),
        "checkpoint-copy": m.CheckpointCopy(
            run=_RUN, rank=0, step=120, to="backup@host:runs", state="failed", seconds=270.0,
            problem="rsync exited with 255: ssh: connect to host host port 22: Connection refused",
        ),
        "profile-written": m.ProfileWritten(
            run=_RUN, rank=0, seq=131, first_step=122, last_step=124, file="rank-0.steps-122-124.trace.json.gz",
            size_bytes=1_204_300, digest="b7" * 32, phases=(_FORWARD,), loop_seconds=0.041,
        ),
        "profile-written-failed": m.ProfileWritten(
            run=_RUN, rank=0, seq=131, problem="the rank left before all steps were recorded"
        ),
        "report": _REPORT,
        "report-checkpoint": msgspec.structs.replace(
            _REPORT,
            kind="checkpoint",
            checkpoint=m.CheckpointInfo(
                path=f"{_VIEW.directory}/checkpoints/step-121", step=121, size_bytes=9_900_000, loop_seconds=0.054
            ),
        ),
        "fenced": m.Fenced(
            run=_RUN, rank=0, generation=_GENERATION.next(), last_step=120, held_from=_GENERATION,
            held=(m.Range(2880, 8),), reports=(_REPORT,),
        ),
        "offered": m.Offered(run=_RUN, rank=0, generation=_GENERATION, endpoints=("127.0.0.1:50211",)),
        "formed": m.Formed(run=_RUN, rank=0, generation=_GENERATION, join_seconds=0.02, level_seconds=0.45),
        "group-failed": m.GroupFailed(
            run=_RUN, rank=0, generation=_GENERATION, reason="all-reduce: connection closed by peer"
        ),
        "report-sync": msgspec.structs.replace(_REPORT, kind="sync", drift=1.3e-7),
        "report-measure": msgspec.structs.replace(_REPORT, kind="measure", samples_per_second=17.3),
        "probed": m.Probed(
            **{**msgspec.structs.asdict(_REPORT), "kind": "probe", "loss_sum": 0.0, "weight": 0.0, "own_weight": 0.0},
            family="llama", tokens_digest="c" * 64, lengths=(2, 1),
            log_probabilities=struct.pack("<3f", -5.5, -2.25, -7.0), weight_norms=struct.pack("<2f", 1.5, 40.0),
        ),
        "work-ask": m.WorkAsk(
            run=_WORK, rank=0, device="mlx gpu Apple M2 Max", answered=0,
            results=(b'{"logprob": -3.5, "tokens": 2, "mean": -1.75}',),
        ),
        "sample-report": m.SampleReport(
            **{**msgspec.structs.asdict(_REPORT), "kind": "sample", "loss_sum": 0.0, "weight": 0.0, "own_weight": 0.0},
            answers=(m.Answer("Once upon a time", " there was a loop.", 6, True, 0.42),),
        ),
        "evaluation-report": m.EvaluationReport(
            **{**msgspec.structs.asdict(_REPORT), "kind": "evaluate", "loss_sum": 5.1, "own_weight": 9.0},
            losses={"pairs": 5.1}, weights={"pairs": 9.0, "answer_tokens": 420.0},
            sums={"rewards/margins": 3.4, "kl": 12.6}, pairs=(_PAIR,),
        ),
        "trainer-failed": m.TrainerFailed(run=_RUN, rank=0, reason="model.safetensors: a tensor is missing"),
    },
    "lead to follower": {
        "peer-hello": m.PeerHello(
            link=_LINK, lead="studio", address="tcp://127.0.0.1:7474", generation=_GENERATION, run=_RUN
        ),
        "peer-host": m.PeerHost(
            link=_LINK, seq=1, run=_RUN, rank=1, generation=_GENERATION,
            config={"run": {"name": "sft-1b", "steps": 60_000}, "batch": {"global": 24}},
        ),
        "peer-relay": m.PeerRelay(link=_LINK, seq=2, rank=1, order=_PLAN),
        "peer-end": m.PeerEnd(link=_LINK, seq=3, run=_RUN, rank=1, state="stopped", reason="asked to"),
        "peer-trainer": m.PeerTrainer(link=_LINK, seq=4, run=_RUN, rank=1, wish="start"),
        "peer-keep": m.PeerKeep(
            link=_LINK, seq=5, run=_RUN,
            items=(codec.encode(m.KeptStep(step=_STEP)), codec.encode(m.KeptValue(key="conductor", value="{}"))),
        ),
        "peer-claim": m.PeerClaim(link=_LINK, seq=6, run=_RUN, term=2, hosted=_HOSTED),
        "peer-ping": m.PeerPing(link=_LINK, seq=3, sent_monotonic=5120.25, round_trip_seconds=0.0021),
    },
    "follower to lead": {
        "peer-welcome": m.PeerWelcome(
            link=_LINK, node="mbp", boot=_BOOT, live_address="tcp://127.0.0.1:7485", version="0.1.0",
            generation=_GENERATION, ranks=(_HOSTED,),
            devices=(m.DeviceTypes("torch", "cuda:0", ("bfloat16", "float16")), m.DeviceTypes("torch", "cpu", ())),
        ),
        "peer-hosted": m.PeerHosted(link=_LINK, seq=1, run=_RUN, rank=1),
        "peer-consent": m.PeerConsent(link=_LINK, seq=2, run=_RUN, term=2),
        "peer-consent-refused": m.PeerConsent(
            link=_LINK, seq=2, run=_RUN, term=3, refusal="mbp has agreed to mini in term 3"
        ),
        "peer-answer": m.PeerAnswer(link=_LINK, seq=2, answer=_REPORT, returned=False),
        "peer-exit": m.PeerExit(link=_LINK, seq=3, run=_RUN, rank=1, clean=False, why="was ended by signal 9"),
        "peer-exit-memory": m.PeerExit(
            link=_LINK, seq=3, run=_RUN, rank=1, clean=False, why="was ended by signal 9, out of memory",
            memory="the kernel killed it for memory (oom_kill 0 → 1)",
        ),
        "peer-beat": m.PeerBeat(
            link=_LINK, seq=3, ranks=(_HOSTED,), loop_lag_seconds=0.0008, host=_HOST, sent_monotonic=5120.25
        ),
        "peer-refusal": m.PeerRefusal(link=_LINK, code="unknown-link", text="this agent was restarted"),
        "peer-refusal-older-term": m.PeerRefusal(
            link=_LINK, code="older-term", text="mbp has seen term 2; studio leads in an older one", run=_RUN,
            state="finished",
        ),
    },
    "kept by followers": {
        "kept-plan": m.KeptPlan(plan=_PLAN),
        "kept-step": m.KeptStep(step=_STEP),
        "kept-part": m.KeptPart(part=_RANK_STEP),
        "kept-event": m.KeptEvent(event=_EVENT),
        "kept-value": m.KeptValue(key="conductor", value='{"seq":0}'),
        "kept-sample": m.KeptSample(sample=_SAMPLE),
        "kept-pairs": m.KeptPairs(pairs=_PAIRS),
        "kept-evaluation": m.KeptEvaluation(step=120, at=_AT, loss=2.31, weight=51_200.0, seconds=1.9),
        "kept-drifts": m.KeptDrifts(step=100, at=_AT, ranks=(0, 1), drifts=(0.0, 1.3e-7)),
        "kept-retraction": m.KeptRetraction(after_step=119, after_event=47),
        "kept-command": m.KeptCommand(
            id=_ID, digest="0" * 64, verb="resize-batch", args={"micro": 4}, by="anna", run=_RUN, node="studio",
            if_plan=2, received_at=_AT, ttl_seconds=60.0, state="applied", step=121, before="studio=8",
            after="studio=4", ended_at=_AT + 0.9, plan_version=3,
        ),
    },
}  # fmt: skip
"""Conversation -> name -> message; a name is the message's tag, and what sets a variant of it apart."""


def vector(conversation: str, name: str) -> dict[str, str | dict[str, Any]]:
    """Return a line of the golden file: the message as plain values (NaN as null) and its frame in hexadecimal."""
    message = EXAMPLES[conversation][name]
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(message))
    return {"name": name, "conversation": conversation, "message": plain, "frame": codec.encode(message).hex()}


def page() -> str:
    """Return the golden file: one vector per line."""
    lines = [vector(talk, name) for talk, examples in EXAMPLES.items() for name in examples]
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(generated.main("tools.protocol_docs.examples", page, Path("tests/golden/wire.jsonl")))
