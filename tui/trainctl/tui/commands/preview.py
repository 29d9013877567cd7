"""What a command would do to the run as it is now, in one line, or why the agent will refuse it: pure."""

import math
from collections.abc import Sequence

from trainctl.protocol import messages as m
from trainctl.protocol.batch.apportion import apportion
from trainctl.protocol.messages import event_prose, verbs
from trainctl.protocol.messages.events import CheckpointWritten, Evaluated
from trainctl.tui.commands import predictions, shares
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.precheck import refusal
from trainctl.tui.state import series as s
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Piece, clean


def preview(order: Order, state: ViewState, glyphs: Glyphs) -> Piece:
    """In one line what the command would do to the run now; or, marked as bad, why the agent will refuse it."""
    problem = refusal(order, state)
    return Piece(problem, "bad") if problem else Piece(_promise(order, state, glyphs), "strong")


def changes_nothing(order: Order, state: ViewState) -> bool:
    """Whether all is as the command would have it already."""
    run, value = state.run, order.args.get("value")
    if run is None:
        return False
    match order.verb:
        case "resize-batch":
            views = [view for view in live_ranks(run) if order.node in (None, view.node)]
            return bool(views) and all(view.micro_batch == order.args.get("micro") for view in views)
        case "set-lr":
            as_shown = float(f.scientific(run.learning_rate))
            return value in (run.learning_rate, as_shown) and order.args.get("schedule", "scale") == "scale"
        case "set-global-batch":
            return value == run.global_batch
    return False


def _promise(order: Order, state: ViewState, glyphs: Glyphs) -> str:
    run = state.run
    if run is None:
        return verbs.VERBS[order.verb].summary
    match order.verb:
        case "resize-batch":
            return _preview_resize(order, state, glyphs)
        case "rebalance":
            return _preview_shares(order, state, glyphs)
        case "drain" | "admit":
            return _preview_members(order, state, glyphs)
        case "promote":
            taken = " even without a majority" if order.args.get("old_lead_is_off") else ""
            return f"{clean(order.node or '')} conducts in the place of {clean(run.lead)}{taken}; curve unchanged"
        case "set-lr":
            return _preview_rate(order, run, glyphs)
        case "set-global-batch":
            return _preview_global(order, state, glyphs)
        case "stop":
            last = "with a checkpoint first" if order.args.get("checkpoint", True) else "WITHOUT a checkpoint"
            return f"ends after step {run.step + 1:,}{_within(state)}, {last}"
        case "acknowledge":
            alert = next((alert for alert in state.open_alerts if alert.id == order.args["id"]), None)
            return clean(f"{alert.node} {alert.text}".strip()) if alert else verbs.VERBS[order.verb].summary
        case "mute":
            where, minutes = f" of {clean(order.node)}" if order.node else "", float(order.args.get("minutes", 60))
            calling = f"call nobody for {minutes:g} min; they are still kept" if minutes else "call again"
            return f"{order.args['kind']} alerts{where} {calling}"
        case "checkpoint":
            return f"writes step {run.step:,} or the one after; {_last_checkpoint(state)}; curve unchanged"
        case "evaluate":
            return f"{_last_evaluation(state, run)}; curve unchanged"
        case "pause":
            return f"waits after step {run.step + 1:,}{_within(state)}; curve unchanged"
        case "resume":
            return f"goes on with step {run.step + 1:,} by plan v{run.plan_version}; curve unchanged"
        case "note":
            return f"in the events at step {run.step:,}; curve unchanged"
        case "start-run":
            resumed = order.args.get("resume")
            return (
                "a run from a run file"
                if resumed is None
                else f"takes up {clean(resumed)} from its newest checkpoint or its ranks' state"
            )
    return verbs.VERBS[order.verb].summary


def _within(state: ViewState) -> str:
    """How long the step in progress may take yet."""
    usual = s.typical(state.lately("step_seconds"))
    active = state.run is not None and state.run.state == "running"
    return f", within about {f.seconds(usual)}" if active and usual is not None else ""


def _last_checkpoint(state: ViewState) -> str:
    """`the last one: 0.3 GB, loop paid 14 ms`."""
    for event in reversed(state.run_events):
        if isinstance(event.data, CheckpointWritten) and event.data.size_bytes is not None:
            return f"the last one: {event_prose.checkpoint_cost(event.data).removeprefix(', ')}"
    return "its size isn't known before the first"


def _last_evaluation(state: ViewState, run: m.RunView) -> str:
    """`the last one: 1.903 @18,122, took 2.1 s`."""
    if run.eval_loss is None or run.eval_step is None:
        return "none was made yet: how long it takes isn't known"
    made = (event.data for event in reversed(state.run_events) if isinstance(event.data, Evaluated))
    seconds = next((data.seconds for data in made if data.seconds is not None), None)
    took = f", took {seconds:.3g} s" if seconds is not None else ""
    return f"the last one: {f.loss(run.eval_loss)} @{run.eval_step:,}{took}"


def _preview_resize(order: Order, state: ViewState, glyphs: Glyphs) -> str:
    micro = int(order.args["micro"])
    seats = shares.seats_of(state)
    parts = []
    for seat in seats:
        if order.node in (None, seat.node):
            old, new = (_passes(seat.share, size, glyphs) for size in (seat.micro_batch, micro))
            parts.append(
                f"{clean(seat.node)} {old} {glyphs.arrow} {new}" if old != new else f"{clean(seat.node)} stays {old}"
            )
    micros = [micro if order.node in (None, seat.node) else seat.micro_batch for seat in seats]
    if all(
        min(seat.share, size) == min(seat.share, seat.micro_batch) for seat, size in zip(seats, micros, strict=True)
    ):
        return f"{_few(parts)}; curve unchanged"
    return _joined(_few(parts), *_resized(state, seats, micros, glyphs), "curve unchanged")


def _resized(
    state: ViewState, seats: Sequence[shares.Seat], micros: Sequence[int], glyphs: Glyphs
) -> tuple[str, str, str]:
    """The step, the memory of the one node that changes, and whether all of it fits."""
    counts = [seat.share for seat in seats]
    then = [predictions.with_micro(seat, size, state.tried) for seat, size in zip(seats, micros, strict=True)]
    step = predictions.seconds_change(
        shares.group_seconds(seats, counts), shares.group_seconds(then, counts), glyphs.arrow
    )
    changed = [(seat, size) for seat, size in zip(seats, micros, strict=True) if size != seat.micro_batch]
    sizes = sorted({size for _, size in changed})
    unknown = f"step time at micro {', '.join(map(str, sizes))} not measured yet"
    memory = predictions.memory_at(changed[0][0], changed[0][0].share, changed[0][1]) if len(changed) == 1 else None
    whole = predictions.fits(seats, counts, micros)
    peak = f"predicted memory {memory}" if memory is not None and not memory.over else ""
    return step or unknown, peak, whole


def _preview_shares(order: Order, state: ViewState, glyphs: Glyphs) -> str:
    seats = shares.seats_of(state)
    wanted = shares.meant(seats, order.args)
    if wanted is None:
        return "own rates are not measured yet; the agent decides"
    return _moved(seats, seats, wanted, glyphs)


def _preview_members(order: Order, state: ViewState, glyphs: Glyphs) -> str:
    """Who leaves or comes back, and what that makes of the others."""
    node = order.node or ""
    if order.verb == "admit":
        seats = shares.seats_of(state, node)
        before = [seat for seat in seats if seat.node != node]
        return _moved(before, seats, shares.with_back(seats, node), glyphs)
    seats = shares.seats_of(state)
    if all(seat.node != node for seat in seats):
        return f"{clean(node)} stays out until it is admitted; curve unchanged"
    staying = [seat for seat in seats if seat.node != node]
    left = [share for share in shares.without(seats, node) if share]
    return f"{clean(node)} leaves; {_moved(seats, staying, left, glyphs)}"


def _moved(before: Sequence[shares.Seat], after: Sequence[shares.Seat], wanted: Sequence[int], glyphs: Glyphs) -> str:
    """What each node of `after` has and gets, and the step and memory that makes; `before` is who takes part now."""
    moved = [
        f"{clean(seat.node)} {seat.share} {glyphs.arrow} {share}"
        for seat, share in zip(after, wanted, strict=True)
        if seat.share != share
    ]
    if not moved:
        return "the split it has; curve unchanged"
    return _joined(_few(moved), *_outcome(before, after, wanted, glyphs), "curve unchanged")


def _outcome(
    before: Sequence[shares.Seat], after: Sequence[shares.Seat], wanted: Sequence[int], glyphs: Glyphs
) -> tuple[str, str]:
    now, then = shares.group_seconds(before, [seat.share for seat in before]), shares.group_seconds(after, wanted)
    step = predictions.seconds_change(now, then, glyphs.arrow) or "step time not known yet"
    return step, predictions.fits(after, wanted, [seat.micro_batch for seat in after])


def _preview_global(order: Order, state: ViewState, glyphs: Glyphs) -> str:
    """The shares grow in proportion, as the agent makes them."""
    assert state.run is not None
    value, now = int(order.args["value"]), state.run.global_batch
    scaled = order.args.get("schedule") == "scale"
    lr = f"lr {glyphs.times}{value / now:.3g}" if scaled else "lr as it is"
    seats = shares.seats_of(state)
    wanted = apportion(value, {index: float(seat.share) for index, seat in enumerate(seats)}) if seats else {}
    outcome = _outcome(seats, seats, tuple(wanted.values()), glyphs) if seats else ()
    return _joined(f"G {now} {glyphs.arrow} {value}, {lr}: changes the curve", *outcome)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _few(parts: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(parts) - 3} more" if len(parts) > 4 else ""
    return ", ".join(parts[:3] if more else parts) + more


def _passes(share: int, micro: int, glyphs: Glyphs) -> str:
    micro = max(min(micro, share), 1)
    return f"{micro}{glyphs.times}{math.ceil(share / micro)}"


def _preview_rate(order: Order, run: m.RunView, glyphs: Glyphs) -> str:
    value = float(order.args["value"])
    change = f"lr {f.scientific(run.learning_rate)} {glyphs.arrow} {f.scientific(value)}"
    if order.args.get("schedule", "scale") == "set":
        return f"{change}, constant from then on: changes the curve"
    times = f", the rest of the schedule {glyphs.times}{value / run.learning_rate:.3g}" if run.learning_rate else ""
    return f"{change}{times}: changes the curve"
