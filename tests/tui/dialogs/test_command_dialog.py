"""The program driven by keys: the dialogs and the command line, from typing to applied, and how it is left."""

import asyncio
import signal

import msgspec
import pytest
from tests.tui.support.driving import body, burst, dialog_text, driven, hint, until
from tests.tui.support.recorded import CONNECTED, Recorded, committed, run_view, snapshot, source_of  # fmt: skip
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input

from trainctl.protocol.client.client import Connection
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.launch import farewell, run_app
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.split_dialog import SplitDialog
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.widgets.command_bar import CommandBar
from trainctl.tui.widgets.line_view import Lines


async def test_it_opens_on_the_overview_of_a_running_run() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert isinstance(app.screen, OverviewScreen)
        assert "118/150" in body(app)
        assert hint(app).startswith("023456 view")
        assert hint(app).endswith("q detach")

    await driven(source_of(1), play)


@pytest.mark.parametrize(
    ("key", "verb"),
    [("b", "resize-batch"), ("l", "set-lr"), ("c", "checkpoint"), ("p", "pause"), ("x", "stop"), ("n", "note"),
     ("e", "evaluate"), ("g", "set-global-batch")],
)  # fmt: skip
async def test_each_control_key_opens_its_dialog_and_escape_closes_it(key: str, verb: str) -> None:
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press(key)
        assert isinstance(app.screen, CommandDialog)
        assert app.screen.form.verb == verb
        assert "changes" in dialog_text(app)
        assert "leaves" in dialog_text(app)
        await pilot.press("escape")
        assert isinstance(app.screen, OverviewScreen)

    await driven(source, play)
    assert source.commands == []


async def test_a_dialog_goes_from_typing_to_applied() -> None:
    source = source_of(1)
    source.gate = asyncio.Event()

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("b", "0")
        assert "micro: must be a whole number of at least 1" in dialog_text(app)
        await pilot.press("enter")
        assert source.commands == []
        await pilot.press("backspace", "4")
        assert "8×3 → 4×6; step time at micro 4 isn't" in dialog_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: "sent → accepted …" in dialog_text(app))
        assert source.gate is not None
        source.gate.set()
        await until(pilot, lambda: "applied @ step 120" in dialog_text(app))
        assert "micro 8 → micro 4" in dialog_text(app)
        assert "plan is now v5" in dialog_text(app)
        await pilot.press("enter")
        await pilot.press("escape")
        assert isinstance(app.screen, OverviewScreen)

    await driven(source, play)
    ((verb, args, options),) = source.commands
    assert (verb, args) == ("resize-batch", {"micro": 4})
    assert options.items() >= {"node": "atlas", "run": "stdlib-20261120-142900", "if_plan": 4}.items()


async def test_a_refusal_stays_readable() -> None:
    source = source_of(1)
    source.replies["set-lr"] = [{"state": "rejected", "field": "value", "reason": "plan has moved on to v6"}]

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("l", *"1e-4", "tab", "right")
        assert "constant from then on" in dialog_text(app)
        await pilot.press("shift+tab", "enter")
        await until(pilot, lambda: "rejected: value: plan has moved on to v6" in dialog_text(app).replace("\n", " "))

    await driven(source, play)
    assert source.commands[0][1] == {"value": 1e-4, "schedule": "set"}


async def test_an_agent_that_does_not_answer_is_said_in_the_dialog() -> None:
    source = source_of(1)
    source.refuses = True

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("c", "enter")
        await until(pilot, lambda: "no answer" in dialog_text(app))

    await driven(source, play)


async def test_what_the_agent_will_refuse_is_said_while_it_is_typed() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("b", "3", "4")
        assert "34 is more than atlas's share of 24 samples" in dialog_text(app)
        await pilot.press("escape", "colon", *"resize-batch micro=34")
        assert "34 is more than atlas's share of 24 samples" in hint(app)

    await driven(source_of(1), play)


async def test_stop_wants_a_y() -> None:
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        for key in ("enter", "n", "escape"):
            await pilot.press("x")
            assert "stop it? y/N" in dialog_text(app)
            await pilot.press(key)
            assert isinstance(app.screen, OverviewScreen)
        assert source.commands == []
        await pilot.press("x", "y")
        await until(pilot, lambda: bool(source.commands))

    await driven(source, play)
    assert source.commands[0][:2] == ("stop", {"checkpoint": True})


async def test_p_resumes_a_paused_run() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert "p resume" in hint(app)
        await pilot.press("p", "enter")
        await until(pilot, lambda: "applied" in dialog_text(app))

    source = source_of(1, state="paused")
    await driven(source, play)
    assert source.commands[0][0] == "resume"


async def test_the_chosen_node_is_the_dialogs() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("down", "down", "down", "b")
        assert isinstance(app.screen, CommandDialog)
        assert app.screen.values() == {"node": "forge", "micro": "13"}
        await pilot.press("shift+tab", "left")
        assert app.screen.values() == {"node": "mbp", "micro": "5"}

    await driven(source_of(4), play)


async def test_the_command_line_checks_previews_sends_and_reports() -> None:
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("colon", *"resize-batch micro=0")
        assert "micro: must be a whole number of at least 1" in hint(app)
        await pilot.press("enter")
        assert source.commands == []
        await pilot.press("backspace", "6")
        assert "8×3 → 6×4; step time at micro 6 isn't measured yet" in hint(app)
        await pilot.press("enter")
        await until(pilot, lambda: "applied @ step 120" in hint(app))
        await pilot.press("escape")
        assert not app.screen.query_one(CommandBar).open
        assert hint(app).startswith("023456 view")
        await pilot.press("colon", "enter")
        assert not app.screen.query_one(CommandBar).open

    await driven(source, play)
    ((verb, args, options),) = source.commands
    assert (verb, args) == ("resize-batch", {"micro": 6})
    assert options.items() >= {"node": None, "run": "stdlib-20261120-142900", "if_plan": None}.items()


async def test_keys_typed_into_the_command_line_are_text() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("colon", "q", "b", "0")
        assert app.screen.query_one("#command", Input).value == "qb0"
        assert "unknown verb" in hint(app)

    await driven(source_of(1), play)


async def test_a_command_whose_dialog_was_closed_still_tells_its_end() -> None:
    source = source_of(1)
    source.gate = asyncio.Event()

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("c", "enter")
        await until(pilot, lambda: bool(source.commands))
        await pilot.press("escape")
        assert source.gate is not None
        source.gate.set()
        await until(pilot, lambda: any("applied @ step 120" in str(note.message) for note in app._notifications))

    await driven(source, play)


async def test_read_only_sends_nothing() -> None:
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert "READ-ONLY" in body(app)
        await pilot.press("c")
        assert "read-only" in dialog_text(app)
        await pilot.press("enter", "y", "escape", "colon", *"pause", "enter")
        assert "read-only" in hint(app)

    await driven(source, play, read_only=True)
    assert source.commands == []


async def test_new_steps_reach_the_screen_and_a_dialog_keeps_its_plan() -> None:
    source = source_of(1)
    view = run_view(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        source.more.put_nowait(committed(view, 119, seq=1))
        await until(pilot, lambda: "119/150" in body(app))
        await pilot.press("b")
        source.more.put_nowait(msgspec.structs.replace(committed(view, 120, seq=2), plan_version=9))
        under = app.screen_stack[-2].query_one("#body", Lines)
        await until(pilot, lambda: "120/150" in under.shown[0])
        await pilot.press("4", "enter")
        await until(pilot, lambda: bool(source.commands))

    await driven(source, play)
    assert source.commands[0][2]["if_plan"] == 4


async def test_the_split_is_moved_typed_sent_and_undone() -> None:
    source = source_of(3)
    source.replies["rebalance"] = [
        {"state": "accepted"},
        {"state": "applied", "step": 120, "before": "torch-a=12 torch-b=10 mlx-c=2",
         "after": "torch-a=12 torch-b=11 mlx-c=1", "plan_version": 5},
    ]  # fmt: skip

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("down", "down", "s")
        dialog = app.screen
        assert isinstance(dialog, SplitDialog)
        assert dialog.split.shares == (12, 10, 2)
        await pilot.press("enter")
        assert source.commands == [], "nothing has changed"
        await pilot.press("right", "plus", "minus", "left")
        assert dialog.split.shares == (12, 10, 2)
        await pilot.press("2", "4")
        assert "torch-b can take at most 22 of 24" in dialog_text(app)
        await pilot.press("enter")
        assert source.commands == []
        await pilot.press("backspace", "backspace", "a")
        assert dialog.split.shares == (12, 11, 1)
        assert "step 0.40 s → 0.32 s" in dialog_text(app)
        await pilot.press("u")
        assert dialog.split.shares == (12, 10, 2)
        await pilot.press("a", "enter")
        await until(pilot, lambda: "applied @ step 120" in dialog_text(app))
        assert "rebalance torch-a=12 torch-b=11 mlx-c=1" in dialog_text(app)
        await pilot.press("u")
        assert dialog.split.shares == (12, 10, 2)
        assert [seat.share for seat in dialog.split.seats] == [12, 11, 1]
        await pilot.press("enter")
        await until(pilot, lambda: len(source.commands) == 2)

    await driven(source, play)
    (first, again) = source.commands
    assert first[:2] == ("rebalance", {"shares": {"torch-a": 12, "torch-b": 11, "mlx-c": 1}})
    assert first[2].items() >= {"node": None, "run": "demo-20261120-142900", "if_plan": 4}.items()
    assert again[1] == {"shares": {"torch-a": 12, "torch-b": 10, "mlx-c": 2}}
    assert again[2]["if_plan"] == 5


async def test_the_split_is_refused_closed_read_only_and_clicked() -> None:
    source = source_of(3)
    source.replies["rebalance"] = [{"state": "rejected", "field": "if_plan", "reason": "the plan has moved on to v6"}]

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("s")
        text = app.screen.query_one("#dialog-text", Lines)
        await pilot.click(text, offset=(text.shown[2].index("+"), 2))
        assert isinstance(app.screen, SplitDialog)
        assert app.screen.split.chosen == 1
        assert sum(app.screen.split.shares) == 24
        assert app.screen.split.shares[1] == 11
        await pilot.press("enter")
        await until(pilot, lambda: "moved on to v6" in dialog_text(app))
        await pilot.press("u", "escape")
        assert isinstance(app.screen, OverviewScreen)

    await driven(source, play)


async def test_a_single_rank_has_no_split_and_a_reader_none_to_send() -> None:
    async def alone(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("s", "right", "5", "enter")
        assert "nothing to split" in dialog_text(app)

    async def watching(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("s", "right", "enter")
        assert "read-only" in dialog_text(app)

    source = source_of(3)
    await driven(source_of(1), alone)
    await driven(source, watching, read_only=True)
    assert source.commands == []


async def test_drain_and_admit_ask_for_a_node() -> None:
    source = source_of(3)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        app.open_dialog("drain")
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        await pilot.press("right")
        assert "torch-b leaves; torch-a 12 → 21, mlx-c 2 → 3; predicted 0.40" in dialog_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))
        await pilot.press("escape", "colon", *"admit --node mlx-c")
        assert "mlx-c is not drained" in hint(app)

    await driven(source, play)
    assert source.commands[0][0] == "drain"
    assert source.commands[0][2]["node"] == "torch-b"


async def test_escape_and_a_key_close_behind_it_are_two_keys() -> None:
    """A terminal can't tell them from alt and the key: a dialog left with both would stay open, and the key be lost."""

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("c")
        assert isinstance(app.screen, CommandDialog)
        app.post_message(events.Key("alt+q", "q"))
        await until(pilot, lambda: app.return_code is not None)

    app = await driven(source_of(1), play)
    assert app.return_code == 0


async def test_another_node_s_agent_that_is_lost_is_named_and_the_run_goes_on() -> None:
    source = source_of(3)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        source.more.put_nowait(("torch-b", Connection("connected", app.clock.monotonic())))
        source.more.put_nowait(("torch-b", Connection("silent", app.clock.monotonic(), "no message")))
        await until(pilot, lambda: "torch-b silent 0s" in body(app))
        assert "118/150" in body(app)

    await driven(source, play)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_detach_leaves_with_status_0_and_says_the_run_goes_on(key: str) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press(key)

    app = await driven(source_of(1), play)
    assert app.return_code == 0
    said = farewell(app.live, "tcp://127.0.0.1:7474")
    assert "stdlib (running) continues at step 118 of 150" in said
    assert "trainctl attach --connect tcp://127.0.0.1:7474" in said


async def test_a_hangup_ends_it() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        signal.raise_signal(signal.SIGHUP)
        await until(pilot, lambda: app.return_code is not None)

    app = await driven(source_of(1), play)
    assert app.return_code == 0


def test_a_bad_address_is_refused_before_the_screen_opens() -> None:
    with pytest.raises(InvalidInputError):
        run_app("nowhere", by="anna")


async def test_a_burst_of_keys_lands_where_the_first_one_led() -> None:
    """All of it in one packet, as over a slow line: none of the letters may act as a key of its own."""
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        burst(app, "b", "4", "enter")
        await until(pilot, lambda: len(source.commands) == 1)
        await pilot.press("escape")
        burst(app, "colon", *"note text=explain", "enter")
        await until(pilot, lambda: len(source.commands) == 2)
        await pilot.press("escape", "4")
        burst(app, "slash", *"anna")
        await until(pilot, lambda: "of 2" in body(app))
        assert isinstance(app.screen, EventsScreen)

    await driven(source, play)
    assert [command[:2] for command in source.commands] == [
        ("resize-batch", {"micro": 4}),
        ("note", {"text": "explain"}),
    ]


@pytest.mark.parametrize(
    ("keys", "shares", "chosen", "typed"),
    [
        ("j j 3", (11, 10, 3), 2, "3"),
        ("down down 1 2 %", (11, 10, 3), 2, "12%"),
        ("2 5 % tab 9", (10, 9, 5), 1, "9"),
        ("j 9 backspace 8 k plus", (15, 8, 1), 0, ""),
    ],
)
async def test_keys_of_one_burst_act_on_the_node_that_was_chosen_before_them(
    keys: str, shares: tuple[int, ...], chosen: int, typed: str
) -> None:
    source = source_of(3)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        burst(app, "s", *keys.split(" "))
        await until(pilot, lambda: isinstance(app.screen, SplitDialog))
        await pilot.pause()
        dialog = app.screen
        assert isinstance(dialog, SplitDialog)
        assert (dialog.split.shares, dialog.split.chosen, dialog.split.typed) == (shares, chosen, typed)
        burst(app, "enter", "enter", "j", "5")
        await until(pilot, lambda: dialog.progress is not None and dialog.progress.ended)
        assert dialog.split.shares == shares

    await driven(source, play)
    assert len(source.commands) == 1


async def test_a_split_whose_plan_has_moved_on_says_so_and_loads_the_new_one() -> None:
    source = source_of(3)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("s", "enter")
        dialog = app.screen
        assert isinstance(dialog, SplitDialog)
        assert "nothing to send: the plan already has this split" in dialog_text(app)
        await pilot.press("down", "5")
        view = run_view(3)
        ranks = tuple(msgspec.structs.replace(item, share=8) for item in view.ranks)
        source.more.put_nowait(msgspec.structs.replace(view, ranks=ranks, plan_version=6, seq=90))
        await until(pilot, lambda: "the plan is now v6" in dialog_text(app))
        await pilot.press("u")
        assert (dialog.split.shares, dialog.split.chosen, dialog.form.if_plan) == ((8, 8, 8), 1, 6)
        assert "now" not in dialog_text(app)

    await driven(source, play)


@pytest.mark.parametrize("size", [(60, 15), (64, 24), (80, 24)])
async def test_the_split_fits_its_screen(size: tuple[int, int]) -> None:
    view = run_view(4, step=18_240, steps=60_000)
    ranks = (*view.ranks[:3], msgspec.structs.replace(view.ranks[3], state="drained"))
    source = Recorded([CONNECTED, snapshot(msgspec.structs.replace(view, ranks=ranks))])

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("s", "0")
        text = dialog_text(app).splitlines()
        widget = app.screen.query_one("#dialog-text", Lines)
        assert max(map(len, text)) <= widget.size.width
        assert len(text) <= widget.size.height
        shown = "\n".join(text)
        for words in ("STEP", "MEM GB", "forge", "each node needs at least 1 sample", "enter sends", "esc closes"):
            assert words in shown
        if size[1] > 15:
            assert "mini is drained; :admit --node mini puts it back" in shown

    await driven(source, play, size)


async def test_a_colon_after_a_command_that_ended_begins_a_new_one() -> None:
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        burst(app, "colon", *"pause", "enter")
        await until(pilot, lambda: "applied" in hint(app))
        burst(app, "colon", *"resume", "enter")
        await until(pilot, lambda: len(source.commands) == 2)
        await pilot.press("colon", *"nonsense-of-a-verb-that-is-long-enough-to-be-cut-at-the-end-of-the-line-by-far")
        rows = app.screen.query_one("#keys", Lines).shown
        assert len(rows) == 4
        assert rows[-1].rstrip().endswith("…")

    await driven(source, play)
    assert [verb for verb, _, _ in source.commands] == ["pause", "resume"]


async def test_help_says_how_to_command_this_agent_from_a_shell() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert "at tcp://127.0.0.1:9999" in body(app)
        await pilot.press("question_mark")
        said = "\n".join(app.screen.query_one("#dialog-text", Lines).shown)
        assert "trainctl send VERB ... --connect tcp://127.0.0.1:9999" in said

    await driven(source_of(1), play, (120, 40), address="tcp://127.0.0.1:9999")
