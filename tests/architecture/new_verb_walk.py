"""Walks every place that a verb shows in, with the verb of patches/new_verb.patch: `python -m` in a patched copy."""

import asyncio
import contextlib
import io
from collections.abc import Callable

from tests.node_agent.support.simulation import Simulation, config
from tests.tui.support.driving import dialog_text, driven, hint, until
from tests.tui.support.recorded import CLOCK, run_view, snapshot, source_of
from textual.pilot import Pilot
from tools.protocol_docs import docs, schema

from tools import pages as generated_pages
from trainctl.node_agent.planning import edits
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs
from trainctl.tui.app import keymap
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.keymap import PaletteProvider
from trainctl.tui.cli import main
from trainctl.tui.commands import arguments, forms, undo
from trainctl.tui.commands.forms import preview
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md

VERB = "follow-schedule"
VIEW = run_view(1, plan_version=4)
STATE = reducer.apply(md.ViewState(), snapshot(VIEW), CLOCK.at_monotonic)


def printed(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main.main([*words]) == 0
    return out.getvalue()


def help_and_completion() -> None:
    text = " ".join(printed("send", VERB, "--help").split())
    for part in (
        f"send {VERB} [factor=]", "of the run file's schedule; number from 0.01 to 100, times; default 1",
        "undone by set-lr", "the loss curve changes", f"trainctl send {VERB} factor=0.5",
    ):  # fmt: skip
        assert part in text, (part, text)
    assert f"{VERB} [factor=]" in " ".join(printed("send", "--help").split())
    assert arguments.next_words([], "fol") == [VERB]
    assert arguments.next_words([VERB], "") == ["factor="]
    assert arguments.completed("fol") == f"{VERB} factor="


def typed_and_dialog() -> None:
    order = arguments.parse(f"{VERB} factor=0.5")
    assert (order.verb, order.args) == (VERB, {"factor": 0.5})
    assert "×0.5: changes the curve" in preview(order, STATE).text
    form = forms.form(VERB, STATE)
    assert (form.title, form.if_plan, form.blocked) == ("follow the schedule", 4, "")
    assert forms.order_of(form, {"factor": "2"}).args == {"factor": 2.0}


def pages() -> None:
    page, document = docs.page(docs.CLIENTS), schema.schema()
    (row,) = [line for line in page.splitlines() if line.startswith(f"|`{VERB}`|") and "|edit|" in line]
    assert row.endswith("|edit|optimisation|learning rate|set-lr|no|"), row
    assert f"|`{VERB}`|`factor`|0.01≤float≤100=1.0|times|of the run file's schedule|" in page
    assert document["$defs"]["FollowSchedule"]["properties"]["factor"]["x-unit"] == "times"
    assert VERB in document["$defs"]["Command"]["properties"]["verb"]["enum"]
    assert f"|`ctrl+l`|`{VERB}`|the run file's schedule again|" in generated_pages.keys_page()
    assert keymap.checked({VERB: "f8"}) == ({VERB: "f8"}, {})


def agent_and_undo() -> None:
    """A conductor with simulated ranks carries it out at the step it names; undo brings the former rate back."""
    simulation = Simulation(config()).begin().until_step(3)
    fixed = simulation.command("set-lr", value=0.5, schedule="set")
    simulation.until_step(6)
    before = simulation.conductor.durable.settings
    id = simulation.command(VERB, factor=0.25)
    simulation.run()
    assert [simulation.ends[one].state for one in (fixed, id)] == ["applied", "applied"]
    rates = {plan.step: plan.learning_rate for plan in simulation.plans if plan.kind == "train"}
    step = simulation.ends[id].step
    assert step is not None
    assert (rates[step - 1], rates[step]) == (0.5, 0.25 * 1e-3)

    made = simulation.ends[id].made
    assert made is not None
    event = m.Event(
        id=7, at=1.0, severity="info", by="anna", data=made, step=step, command=id, verb=VERB, outcome="applied"
    )
    inverse = undo.of(event, VIEW, [event])
    assert (inverse.order.verb, inverse.order.undoes) == ("set-lr", id)
    args = verbs.check(inverse.order.verb, dict(inverse.order.args))
    assert edits.apply(before, args, None, step, config()).settings.lr == before.lr
    later = m.Event(
        id=8, at=2.0, severity="info", by="otto", data=made, step=step, command="x", verb="set-lr", outcome="applied"
    )
    assert undo.of(event, VIEW, [event, later]).since == (later,)


async def screen() -> None:
    """Palette, key, dialog and the `:` line of the full screen."""
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        entry = next(entry for entry in PaletteProvider(app.screen).entries() if entry.name == VERB)
        for opened in (entry.run, lambda: pilot.press("ctrl+l")):
            await _open(pilot, app, opened)
            await pilot.press("backspace", "2", "enter")
            await until(pilot, lambda: "applied" in hint(app))
        await pilot.press("colon", *VERB, "space", *"factor=3")
        assert "×3: changes the curve" in hint(app)
        await pilot.press("enter")
        await until(pilot, lambda: len(source.commands) == 3)

    await driven(source, play)
    assert [(verb, args) for verb, args, _ in source.commands] == [
        (VERB, {"factor": 2.0}), (VERB, {"factor": 2.0}), (VERB, {"factor": 3.0}),
    ]  # fmt: skip


async def _open(pilot: Pilot[int], app: TrainctlApp, opened: Callable[[], object]) -> None:
    found = opened()
    if asyncio.iscoroutine(found):
        await found
    await pilot.pause()
    assert "the optimisation, from the step" in dialog_text(app)


if __name__ == "__main__":
    help_and_completion()
    typed_and_dialog()
    pages()
    agent_and_undo()
    asyncio.run(screen())
    print("walked")
