"""Alerts for the screens' tests: what a lead and a follower would report of the fleet of four."""

from tests.tui.support.recorded import BOOT, NOW, Recorded, run_view, under_way

from trainctl.protocol import messages as m

CLOCK_ALERT = m.AlertView(
    id="clock:mbp:1", kind="clock", severity="warning", node="mbp", rank=1, step=18_239, raised_at=NOW - 64,
    text="+0.14 s in backward: 84 °C, 1.62→1.38 GHz",
    facts=("data 19 ms, forward 0.95 s→0.96 s, backward 1.85 s→1.99 s",
           "Apple M3 Max: 98 % used, 1.38 GHz, 54 W, 84 °C", "mbp: cpu 31 %, load 4.2"),
)  # fmt: skip
LOST_ALERT = m.AlertView(
    id="node-lost:mini:3", kind="node-lost", severity="error", node="mini", rank=3, step=13_320, raised_at=NOW - 15000,
    text="lost: no heartbeat", facts=("rank 3: lost, share 0, micro-batch 4",), acknowledged_by="anna",
)  # fmt: skip
SPIKE_ALERT = m.AlertView(
    id="loss-spike", kind="loss-spike", severity="warning", step=18_236, raised_at=NOW - 12,
    text="loss 2.411 at step 18,236, trend 1.84",
    facts=("scatter over the last 100 steps 0.031", "loss 2.411, gradient norm 6.2"),
)  # fmt: skip
DISK_ALERT = m.AlertView(
    id="disk:forge", kind="disk", severity="warning", node="forge", step=17_900, raised_at=NOW - 3000,
    text="4.2 GB left on the disk that holds its runs", muted=True,
)  # fmt: skip
MUTE = m.MuteView(kind="disk", node="forge", until_at=NOW + 600, by="anna")
ALERTS = (LOST_ALERT, DISK_ALERT, CLOCK_ALERT, SPIKE_ALERT)


def alerts(*found: m.AlertView, seq: int = 0, mutes: tuple[m.MuteView, ...] = ()) -> m.Alerts:
    return m.Alerts(node="studio", alerts=found, mutes=mutes, boot=BOOT, seq=seq)


def alerted(*found: m.AlertView) -> Recorded:
    """The fleet under way, with alerts open."""
    messages = under_way(run_view(4, step=18_240, steps=60_000))
    return Recorded([*messages, alerts(*(found or ALERTS), seq=900, mutes=(MUTE,))])
