"""The Policies screen: each policy's values and next command, its mode by keys, its last command undone."""

import msgspec
from tests.tui.support.driving import MovingClock, body, dialog_text, running, until
from tests.tui.support.pictures import Pictures, at_columns
from tests.tui.support.recorded import BOOT, NOW, Recorded, app_of, run_view, source_of, under_way

from trainctl.protocol import messages as m
from trainctl.protocol.config.policies import POLICIES
from trainctl.protocol.messages.events import SharesChanged
from trainctl.tui.screens import policies_view
from trainctl.tui.screens.policies import PoliciesScreen
from trainctl.tui.state.effects import Effect, PolicyReport

MODES = tuple(m.PolicyView(name, entry.default) for name, entry in POLICIES.items())
RUN = run_view(4, step=18_240, steps=60_000, policies=MODES)
SPLIT = m.Event(
    id=7, at=NOW - 300, severity="info", by="auto:rebalance", run=RUN.run, step=18_140, verb="rebalance",
    command="00000000-0000-0000-0000-000000000007", outcome="applied", boot=BOOT, seq=7,
    data=SharesChanged(
        before={"studio": 20, "mbp": 15, "forge": 29}, after={"studio": 16, "mbp": 9, "forge": 39},
        cause="a step takes 4.1 s by the medians of 8 steps; with this split 3.06 s",
    ),
)  # fmt: skip
SEEN = {
    "rebalance": m.PolicyStatus(
        "rebalance", "on",
        (m.PolicyFigure("gain of the best split", 0.031, 0.05, "part"),
         m.PolicyFigure("windows in a row that showed it", 0, 3, acts="at")),
        why="moves samples if steps get 5 % faster in 3 windows of 8 steps, or 10 % at once", actions=(SPLIT,),
    ),
    "micro-batch": m.PolicyStatus(
        "micro-batch", "on", (m.PolicyFigure("highest peak memory, mean of 10 steps", 0.934, 0.9, "part"),),
        "resize-batch micro=10 --node forge", "mean peak memory over 10 steps: 93 % of the cap; target 90 %",
        "12 more steps that measure the effect of the last change",
    ),
    "spike": m.PolicyStatus(
        "spike", "advise",
        (m.PolicyFigure("loss above its trend", 1.24, 6, "scatters"),
         m.PolicyFigure("gradient norm above its trend", None, 6, "scatters")),
        why="goes back before a spike that lasts more than 50 steps",
    ),
}  # fmt: skip
TOLD = m.Policies(
    rid="r", run=RUN.run, step=18_240,
    policies=tuple(SEEN.get(name, m.PolicyStatus(name, "off")) for name in POLICIES),
)  # fmt: skip


def telling() -> Recorded:
    source = Recorded(under_way(RUN))
    source.known_policies = TOLD
    return source


async def test_the_panel(pictures: Pictures) -> None:
    await pictures.compare(app_of(telling()), 80, "P", *["down"] * 5)


@at_columns(80, 120)
async def test_the_panel_on_a_policy_that_has_acted(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(telling()), columns, "P", *["down"] * 3)


async def test_the_panel_in_ascii(pictures: Pictures) -> None:
    await pictures.compare(app_of(telling(), in_ascii=True), 80, "P")


async def test_keys_change_the_mode_turn_it_off_and_undo_its_last_command() -> None:
    source = telling()

    async with running(source, (120, 40)) as (pilot, app):
        await pilot.press("P")
        await until(pilot, lambda: "resize-batch micro=10" in body(app))
        await pilot.press(*["down"] * 3)
        assert "gain of the best split: 3.1 %, acts above 5 %" in body(app)
        await pilot.press("o")
        await until(pilot, lambda: len(source.commands) == 1)
        await pilot.press("enter")
        await until(pilot, lambda: type(app.screen).__name__ != "PoliciesScreen")
        assert "what the policy does automatically" in dialog_text(app)
        await pilot.press("escape", "u")
        await until(pilot, lambda: bool(app.screen.query("#dialog-text")) and "undo" in dialog_text(app))
        await pilot.press("escape")
    assert [(verb, args) for verb, args, _ in source.commands] == [("autopilot", {"name": "rebalance", "mode": "off"})]


async def test_a_request_that_failed_is_repeated_after_a_second_though_the_run_makes_no_step() -> None:
    source, clock = source_of(4, state="paused"), MovingClock()

    async with running(source, (120, 40), clock=clock) as (pilot, app):
        await pilot.press("P")
        await until(pilot, lambda: "isn't active" in body(app))
        source.known_policies = TOLD
        app.paint()
        await pilot.pause(0.1)
        assert "isn't active" in body(app), "not before a second has passed"
        clock.at = PoliciesScreen.POLL_SECONDS
        app.paint()
        await until(pilot, lambda: "resize-batch micro=10" in body(app))


def test_a_figure_is_beyond_its_threshold_on_the_side_where_its_policy_acts() -> None:
    beyond = policies_view.is_beyond
    assert beyond(m.PolicyFigure("x", 2, 1)) and not beyond(m.PolicyFigure("x", 1, 1))
    assert beyond(m.PolicyFigure("x", 1, 1, acts="at"))
    assert beyond(m.PolicyFigure("x", 0, 1, acts="below")) and not beyond(m.PolicyFigure("x", 1, 1, acts="below"))
    assert "not known yet" in policies_view.figure_words(m.PolicyFigure("best held-out loss", None))
    assert policies_view.figure_words(m.PolicyFigure("x", 2, 1), "advise").endswith("advises above 1")


def test_the_command_line_has_commands_and_their_effects_in_words_and_as_objects() -> None:
    report = PolicyReport(TOLD, (), {7: Effect(100.0, 130.0, 20, 20)})
    text = policies_view.text(report)
    assert "  next  sends resize-batch micro=10 --node forge\n" in text
    assert "effect: 100 → 130 tokens/s, +30.0 % (medians of 20 and 20 steps)" in text
    (row,) = [row for row in policies_view.objects(report) if row["name"] == "rebalance"]
    assert row["figures"][0]["value"] == 0.031 and row["figures"][0]["threshold"] == 0.05
    assert row["actions"][0]["effect"] == {"rate_before": 100.0, "rate_after": 130.0}
    assert msgspec.json.encode(row)
