"""The Prometheus endpoint's pure parts: what is counted, what a snapshot says, where to listen; and the dashboard."""

import math
import re
from typing import Any

import msgspec
import pytest
from tests.node_agent.support import records
from tests.node_agent.support.dashboard import DASHBOARD, queries

from trainctl.node_agent.clients.query_context import LiveRun
from trainctl.node_agent.exporter import catalogue
from trainctl.node_agent.exporter.samples import AgentSnapshot, Histogram, Totals, readings
from trainctl.protocol import messages as m
from trainctl.protocol.config.addresses import check_listen, parse_listen
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.events import CommandApplied

EVENT = m.Event(id=1, at=1.0, severity="good", by="me", data=CommandApplied(), verb="set-lr", outcome="applied")
HOST = m.HostReading(
    node="a", read_at=1.0, cpu_percent=50.0, memory_used_bytes=None, memory_total_bytes=8, disk_free_bytes=None,
    gpus=(m.GpuReading("M2", clock_mhz=1398.0), m.GpuReading("M2", utilization_percent=0.0)),
    processes=(m.ProcessReading(1, "trainer", 0, 90.0, 5), m.ProcessReading(2, "trainer", 0, 20.0, 6),
               m.ProcessReading(3, "agent", None, None, 7)),
)  # fmt: skip
RANK = m.RankView(rank=0, node="node-0", state="run", since_at=0.0, share=24, micro_batch=8)
VIEW = m.RunView(
    run="run-1", name="x", state="running", lead="a", engine="gloo", generation=m.Generation(2, 3), step=2, steps=9,
    plan_version=4, global_batch=24, samples=None, cursor=48, learning_rate=1.0, started_at=5.0, ranks=(RANK,),
    directory="/",
)  # fmt: skip
ALERTS = m.Alerts(node="a", alerts=(m.AlertView("disk:a", "disk", "warning", "full", 1.0, node="a"),))


def counted(*messages: m.Live) -> Totals:
    totals = Totals()
    for message in messages:
        totals.add(message)
    return totals


def snapshot(
    live: LiveRun | None = None,
    totals: Totals | None = None,
    host: m.HostReading | None = None,
) -> AgentSnapshot:
    node = m.NodeView("a", "b00t", "tcp://x:1", "tcp://x:2", host, "1.0")
    peers = tuple(m.PeerView(name, "", None, state, 0.0) for name, state in PEERS.items())
    return AgentSnapshot(10.0, 3.0, node, peers, (live,) if live is not None else (), None, totals or Totals())


PEERS: dict[str, Any] = {"b": "connected", "c": "silent", "d": "unknown"}


def said(shown: AgentSnapshot) -> dict[tuple[str, ...], Any]:
    """Values by name and labels; each name and its labels are as the catalogue has them, and none comes twice."""
    found: dict[tuple[str, ...], Any] = {}
    for reading in readings(shown, 12.5):
        assert len(reading.labels) == len(catalogue.SPECS[reading.name].labels)
        assert (reading.name, *reading.labels) not in found
        found[(reading.name, *reading.labels)] = reading.value
    return found


def test_steps_and_parts_are_summed() -> None:
    totals = counted(
        records.step(1, seconds=0.05), records.part(1), records.step(2, seconds=400.0), records.part(2), EVENT
    )
    found = said(snapshot(totals=totals))
    assert found["trainctl_steps_total", "run-1"] == 2
    assert found["trainctl_tokens_total", "run-1"] == 2 * 4096
    assert found["trainctl_weight_total", "run-1"] == 2 * 3072
    assert found["trainctl_rank_tokens_total", "run-1", "node-0", "0"] == 200
    assert found["trainctl_rank_phase_seconds_total", "run-1", "node-0", "0", "backward"] == 1.0
    assert found["trainctl_events_total", "a", "command", "good"] == 1
    assert found["trainctl_commands_total", "a", "set-lr", "applied"] == 1
    histogram = found["trainctl_step_duration_seconds", "run-1"]
    assert isinstance(histogram, Histogram)
    counts = dict(histogram.buckets)
    assert (counts["0.025"], counts["0.05"], counts["300"], counts["+Inf"]) == (0, 1, 1, 2)
    assert histogram.total == pytest.approx(400.05)


def test_another_run_begins_again_and_what_is_no_number_spoils_no_sum() -> None:
    other = msgspec.structs.replace(records.step(1), run="run-2", weight=math.nan, tokens=0, skipped="nan")
    ended = msgspec.structs.replace(VIEW, run="run-1", state="finished")
    found = said(snapshot(totals=counted(records.step(1), records.part(1), ended, other)))
    assert found["trainctl_steps_total", "run-2"] == found["trainctl_skipped_steps_total", "run-2"] == 1
    assert found["trainctl_tokens_total", "run-2"] == found["trainctl_weight_total", "run-2"] == 0
    assert not [key for key in found if "run-1" in key]
    beside = said(snapshot(totals=counted(records.step(1), other, records.step(2))))
    assert (beside["trainctl_steps_total", "run-1"], beside["trainctl_steps_total", "run-2"]) == (2, 1)


def test_what_ranks_compute_in_is_a_label_with_every_value_once() -> None:
    kinds = (
        m.Compute("bfloat16", False, "off", "sdpa", "bfloat16"), m.Compute("bfloat16", True, "off", "sdpa"),
        m.Compute("float32", None, "off", "mx.fast"), None,
    )  # fmt: skip
    ranks = tuple(msgspec.structs.replace(RANK, rank=rank, compute=compute) for rank, compute in enumerate(kinds))
    found = said(snapshot(LiveRun(msgspec.structs.replace(VIEW, ranks=ranks), None, (), None)))
    ((labels, value),) = ((labels, value) for labels, value in found.items() if labels[0] == "trainctl_run_info")
    assert labels[-8:] == ("bfloat16,float32", "off,on", "off", "mx.fast,sdpa", "bfloat16", "", "", "") and value == 1


def test_what_a_guest_does_not_say_is_absent() -> None:
    unsaid = {"loss": None, "weight": None, "tokens": None, "learning_rate": None, "grad_norm": None, "cursor": None}
    last = msgspec.structs.replace(records.step(1), **unsaid, global_batch=None)
    rank = msgspec.structs.replace(RANK, share=None, micro_batch=None)
    view = msgspec.structs.replace(
        VIEW, kind="guest", steps=None, global_batch=None, cursor=None, learning_rate=None, ranks=(rank,)
    )
    part = msgspec.structs.replace(records.part(1), micro_batch=None)
    found = said(snapshot(LiveRun(view, last, (part,), None), counted(last, part)))
    names = {name for name, *_ in found}
    assert not names & {
        "trainctl_run_target_steps", "trainctl_run_cursor_samples", "trainctl_global_batch_samples", "trainctl_loss",
        "trainctl_learning_rate", "trainctl_gradient_norm", "trainctl_share_samples", "trainctl_micro_batch_samples",
        "trainctl_tokens_total", "trainctl_weight_total", "trainctl_weight_per_second",
    }  # fmt: skip
    assert found["trainctl_run_step", "run-1"] == 2 and found["trainctl_steps_total", "run-1"] == 1


def test_what_is_not_known_is_absent() -> None:
    found = said(snapshot(host=HOST))
    names = {name for name, *_ in found}
    assert "trainctl_host_memory_used_bytes" not in names
    assert "trainctl_agent_event_loop_lag_seconds" not in names
    assert "trainctl_gpu_power_watts" not in names
    assert not [name for name in names if name.startswith(("trainctl_run", "trainctl_loss", "trainctl_steps"))]
    assert found["trainctl_host_cpu_ratio", "a"] == 0.5
    assert ("trainctl_gpu_utilization_ratio", "a", "0", "M2") not in found
    assert found["trainctl_gpu_utilization_ratio", "a", "1", "M2"] == 0  # that is a reading
    assert found["trainctl_gpu_clock_hertz", "a", "0", "M2"] == 1.398e9
    assert found["trainctl_agent_process_memory_bytes", "a", "trainer", "0"] == 11
    assert found["trainctl_agent_process_cpu_ratio", "a", "trainer", "0"] == pytest.approx(1.1)
    assert ("trainctl_agent_process_cpu_ratio", "a", "agent", "") not in found
    assert found["trainctl_agent_snapshot_age_seconds", "a"] == 2.5
    assert found["trainctl_active_runs", "a"] == 0
    peers = {labels[1]: value for (name, *labels), value in found.items() if name == "trainctl_peer_connected"}
    assert peers == {"b": True, "c": False}


def test_a_run_is_shown_with_its_ranks_and_alerts() -> None:
    last = records.step(2, loss=math.nan)
    found = said(snapshot(LiveRun(VIEW, last, (records.part(2),), ALERTS)))
    assert found["trainctl_run_info", "run-1", "x", "a", "gloo", "tokens", "nats per token", *[""] * 8] == 1
    assert found["trainctl_run_state", "run-1", "running"] == 1
    assert math.isnan(found["trainctl_loss", "run-1"])
    assert found["trainctl_generation_number", "run-1"] == 3
    assert found["trainctl_share_samples", "run-1", "node-0", "0"] == 24
    assert found["trainctl_rank_memory_bytes", "run-1", "node-0", "0"] == 10**9
    assert ("trainctl_rank_memory_cap_bytes", "run-1", "node-0", "0") not in found
    assert found["trainctl_alerts_firing", "run-1"] == 1
    assert found["trainctl_alert_firing", "run-1", "disk", "a", "", "warning"] == 1
    assert ("trainctl_eval_loss", "run-1") not in found


def test_the_dashboard_asks_for_what_there_is() -> None:
    names = {name for query in queries() for name in re.findall(r"trainctl_\w+", query)}
    assert len(queries()) > 25
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    assert names <= {f"{spec.name}{end}" for spec in catalogue.SPECS.values() for end in ends.get(spec.kind, ("",))}
    for query in queries():
        for name, inside in re.findall(r"(trainctl_\w+?)(?:_bucket|_sum|_count)?\{([^}]*)\}", query):
            labels = set(re.findall(r"(\w+)=", inside))
            assert labels <= set(catalogue.SPECS[name].labels), query
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("text", "trusted", "fine"),
    [
        ("127.0.0.1:9474", (), True),
        ("localhost:0", (), True),
        ("[::1]:9474", (), True),
        ("10.0.0.7:9474", (), False),
        ("10.0.0.7:9474", ("10.0.0.0/24",), True),
        ("10.0.1.7:9474", ("10.0.0.0/24",), False),
        ("0.0.0.0:9474", ("0.0.0.0/0",), False),
        ("[fd00::1]:9474", ("10.0.0.0/24", "fd00::/8"), True),
    ],
)
def test_only_where_it_is_trusted(text: str, trusted: tuple[str, ...], fine: bool) -> None:
    asked = parse_listen(text, "--metrics")
    check_listen(asked, "--metrics", trusted, anyone=True)
    if fine:
        check_listen(asked, "--metrics", trusted)
        return
    with pytest.raises(InvalidInputError, match=r"without a key: use 127.0.0.1:9474, .* --metrics-for-anyone"):
        check_listen(asked, "--metrics", trusted)


@pytest.mark.parametrize(
    "text", ["9474", "studio:9474", "127.0.0.1:", "127.0.0.1:70000", ":9474", "127.0.0.1:x", "::1:²"]
)
def test_what_is_no_place_is_named(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"--metrics: .* is not IP-ADDRESS:PORT, such as 127.0.0.1:9474"):
        parse_listen(text, "--metrics")
