"""What `y` copies from each screen: (what it is, the text), the most likely first."""

import math

from trainctl.protocol.messages import Event, RunSummary
from trainctl.tui.state import run_events
from trainctl.tui.state.rank_rows import Row
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.run_lines import LAST_LOSS

Values = tuple[tuple[str, str], ...]


def of_fleet(state: ViewState, row: Row | None) -> Values:
    """Of the chosen node, and of the run."""
    made: list[tuple[str, str]] = []
    if row is not None:
        why = (("why", row.view.why),) if row.view.why else ()
        rate = (("own tok/s", f"{row.own_rate:.1f}"),) if row.own_rate is not None else ()
        address = state.node.address if state.node is not None and state.node.node == row.view.node else ""
        pid = (("pid", str(row.view.pid)),) if row.view.pid is not None else ()
        made += [("node", row.view.node), *([("address", address)] if address else []), *rate, *pid, *why]
    if state.run is not None:
        made += [("run", state.run.run), ("directory", state.run.directory), ("step", str(state.run.step))]
        loss = state.last_step.value.loss if state.last_step is not None else None
        if loss is not None and math.isfinite(loss):
            made.append((LAST_LOSS.label, f"{loss:.6g}"))
    return tuple(made)


def of_event(event: Event, at: str) -> Values:
    """Of an event; `at` is its time as it is shown."""
    made = [("line", f"{at} {event.by} {run_events.event_words(event)}"), ("text", event.text)]
    made += [("step", str(event.step))] if event.step is not None else []
    made += [(name, value) for name, value in (("before", event.before), ("after", event.after)) if value]
    return tuple([*made, ("command id", event.command)] if event.command else made)


def of_run(run: RunSummary) -> Values:
    """Of a run in the list."""
    loss = ((LAST_LOSS.label, f.loss(run.last_loss)),) if run.last_loss is not None else ()
    return (("run", run.run), ("directory", run.directory), ("name", run.name), *loss)
