"""The Diagnosis screen: the verdict, each finding in full, and a remedy's dialog, which sends nothing by itself."""

import pytest
from tests.tui.support.driving import MovingClock, body, running, until
from tests.tui.support.pictures import Pictures
from tests.tui.support.recorded import NOW, Recorded, app_of, run_view, under_way

from trainctl.protocol import messages as m
from trainctl.tui.screens import diagnosis_view
from trainctl.tui.screens.diagnosis import DiagnosisScreen

RUN = run_view(4, step=18_240, steps=60_000)
QUOTA = m.Finding(
    cause="throttled", title="mbp is held back by its CPU quota", severity="warning", node="mbp", rank=1,
    evidence=(
        "the quota was used up in 62 % of its periods", "backward takes 0.81 s, and took 0.60 s in its best steps",
    ),
    ruled_out=("a disk is slow: I/O pressure 0 %", "swap: no bytes swapped in or out"),
    what_if=m.WhatIf(1.02, 0.81, "without mbp's quota a step takes 0.81 s, not 1.02 s"),
    remedies=(
        m.Remedy("cool the machine, or raise its power limit or quota"),
        m.Remedy("a smaller micro-batch", "trainctl send resize-batch micro=3 --node mbp", "resize-batch"),
        m.Remedy("measure the device again", "trainctl calibrate --node mbp"),
    ),
)  # fmt: skip
LINK = m.Finding(
    cause="slow-link", title="the sum takes 31 % of a step", severity="info",
    evidence=("the link to forge moves 11 MB/s, calibrated 118 MB/s",),
    what_if=m.WhatIf(1.02, 0.90, "with the calibrated link a step takes 0.90 s, not 1.02 s"),
    remedies=(m.Remedy("use a faster link: trainctl calibrate measures it", "trainctl calibrate"),),
)  # fmt: skip
NAN = m.Finding(
    cause="not-finite", title="gradients weren't finite in 4 of the last 24 steps", severity="error",
    evidence=("steps 18,231 to 18,234 were skipped",),
    remedies=(m.Remedy("a lower learning rate", "trainctl send set-lr value=0.00001", "set-lr"),),
)  # fmt: skip
CHECKED = (
    m.CheckedCause("hang", "clear", "the last step was committed 1 s ago"),
    m.CheckedCause("throttled", "clear", "studio: no limit of its clock, no quota"),
    m.CheckedCause("swap", "unknown", "swap of studio"), m.CheckedCause("swap", "clear", "forge: no bytes swapped"),
    m.CheckedCause("small-micro", "unknown", "the curve of mbp: trainctl calibrate measures it"),
)  # fmt: skip


def reply(*findings: m.Finding, live: bool = True) -> m.DiagnosisReply:
    found = m.Diagnosis(
        at=NOW, step=18_240, first_step=18_217, step_seconds=1.02, findings=findings, checked=CHECKED
    )  # fmt: skip
    return m.DiagnosisReply(rid="r", run=RUN.run, live=live, diagnosis=found)


def telling(*findings: m.Finding) -> Recorded:
    source = Recorded(under_way(RUN))
    source.known_diagnosis = reply(*findings)
    return source


@pytest.mark.parametrize(
    ("findings", "columns"),
    [((), 80), ((QUOTA,), 80), ((NAN, QUOTA, LINK), 80), ((NAN, QUOTA, LINK), 120)],
    ids=["healthy", "one", "several-80x24", "several-120x40"],
)
async def test_the_screen(pictures: Pictures, findings: tuple[m.Finding, ...], columns: int) -> None:
    await pictures.compare(app_of(telling(*findings)), columns, "D", *["down"] * (len(findings) > 1))


async def test_the_screen_in_ascii(pictures: Pictures) -> None:
    await pictures.compare(app_of(telling(QUOTA), in_ascii=True), 80, "D")


async def test_a_key_opens_the_remedy_s_dialog_filled_and_sends_nothing() -> None:
    source = telling(NAN, QUOTA, LINK)

    async with running(source, (120, 40)) as (pilot, app):
        await pilot.press("D")
        await until(pilot, lambda: "4 of the last 24 steps; 2 more findings" in body(app))
        await pilot.press("down")
        assert "without mbp's quota a step takes 0.81 s" in body(app)
        await pilot.press("enter")
        await until(pilot, lambda: type(app.screen).__name__ != "DiagnosisScreen")
        assert app.screen.query_one("#field-node").value == "mbp"  # type: ignore[attr-defined]
        assert app.screen.query_one("#field-micro").value == "3"  # type: ignore[attr-defined]
        await pilot.press("escape", "down", "enter")  # of the last one: no verb
        await until(pilot, lambda: any("trainctl calibrate" in one.message for one in app._notifications))
    assert source.commands == []


async def test_of_a_run_that_has_ended_the_key_only_says_what_to_do() -> None:
    source = telling()
    source.known_diagnosis = reply(NAN, live=False)
    async with running(source, (120, 40)) as (pilot, app):
        await pilot.press("D")
        await until(pilot, lambda: "4 of the last 24 steps" in body(app))
        await pilot.press("enter")
        await until(pilot, lambda: any("set-lr value" in note.message for note in app._notifications))
        assert isinstance(app.screen, DiagnosisScreen)
    assert source.commands == []


async def test_the_chosen_finding_stays_chosen_when_another_comes_before_it() -> None:
    source, clock = telling(LINK, QUOTA), MovingClock()

    async with running(source, (120, 40), clock=clock) as (pilot, app):
        await pilot.press("D")
        await until(pilot, lambda: "1 more finding" in body(app))
        await pilot.press("down")
        assert "62 %" in body(app)
        source.known_diagnosis = reply(NAN, LINK, QUOTA)
        app.paint()
        await pilot.pause(0.1)
        assert "1 more finding" in body(app), "not before a few seconds have passed"
        clock.at = DiagnosisScreen.POLL_SECONDS
        app.paint()
        await until(pilot, lambda: "2 more findings" in body(app))
        assert "62 %" in body(app)


async def test_an_agent_that_does_not_answer_is_said_and_asked_again() -> None:
    source, clock = Recorded(under_way(RUN)), MovingClock()

    async with running(source, (120, 40), clock=clock) as (pilot, app):
        await pilot.press("D")
        await until(pilot, lambda: "no answer from studio" in body(app))
        source.known_diagnosis = reply()
        clock.at = DiagnosisScreen.POLL_SECONDS
        app.paint()
        await until(pilot, lambda: "nothing found: 3 causes were checked; too little is known about 1" in body(app))


def test_the_command_line_fits_80_columns_and_has_each_finding_with_its_remedies() -> None:
    text = diagnosis_view.text(reply(NAN, QUOTA, LINK))
    assert f"--run {RUN.run}" in " ".join(text.split()), "other runs may be active"
    assert all(len(line) <= 80 for line in text.splitlines())
    for finding in (NAN, QUOTA, LINK):
        assert all(remedy.command in text for remedy in finding.remedies if remedy.command)
    made = diagnosis_view.objects(reply(QUOTA))
    assert (made["verdict"], made["live"], made["findings"][0]["cause"]) == (QUOTA.title, True, "throttled")
