"""A mirror by what it hands to a target, over a record that grows, goes back and says things late; and its errors."""

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.node_agent.support import records
from tests.tui.support.cli_calls import assert_one_line, call
from tests.tui.support.recorded import run_view
from tests.tui.support.run_directory import sample

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.events import NoteWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.tui.export.mirror.metrics import Point, Text, flat, of_evaluation, of_step, prefixes
from trainctl.tui.export.mirror.progress import MirrorProgress, MirrorProgressFile
from trainctl.tui.export.mirror.run_source import DirectorySource
from trainctl.tui.export.mirror.sync import PAGE, Mirror

SECOND = m.Generation(1, 2)


class Sheet:
    """A target that keeps what it receives."""

    name = "sheet"

    def __init__(self) -> None:
        self.forgets = False
        self.points: list[tuple[int, int, dict[str, float]]] = []  # step, attempt, values
        self.losses: list[tuple[int, float]] = []
        self.perplexities: list[float | None] = []
        self.texts: list[tuple[int, str]] = []
        self.backs: list[int] = []
        self.numbers: list[int] = []

    def back(self, step: int) -> None:
        self.backs.append(step)

    def point(self, point: Point, number: int, attempt: int) -> None:
        self.points.append((point.step, attempt, point.values))
        self.numbers.append(number)

    def evaluation(self, step: int, values: Mapping[str, float], at: float, number: int) -> None:
        self.losses.append((step, values["eval/loss"]))
        self.perplexities.append(values.get("eval/perplexity"))
        self.numbers.append(number)

    def text(self, text: Text, number: int) -> None:
        self.texts.append((text.step, text.text))
        self.numbers.append(number)

    def flush(self) -> None:
        self.flushed = len(self.numbers)

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.points]


class Written(DirectorySource):
    """A run directory that is read once all that a test has given is written."""

    def __init__(self, folder: Path, recorder: RunDb) -> None:
        super().__init__(folder)
        self._recorder = recorder

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "close":
            self._recorder.flush()
        return super().__getattribute__(name)


class Growing:
    """A run directory whose record a test writes, and a mirror of it that follows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run-1"
        self.folder.mkdir()
        self.recorder = RunDb(RunPaths(self.folder), resumable=False)
        self.source = Written(self.folder, self.recorder)
        self.now = 1000.0

    def commit(self, first: int, last: int, generation: m.Generation = records.FIRST, loss: float = 2.5) -> None:
        for step in range(first, last + 1):
            part = records.part(step, generation=generation)
            self.recorder.commit(records.step(step, generation, loss), [part], 1000.0 + step)
        self.now = 1000.0 + last

    def say(self, text: str, step: int | None) -> m.Event:
        return self.recorder.event(self.now, NoteWritten(text), "info", "anna", step=step)

    def mirror(self, sheet: Sheet, place: MirrorProgress | None = None) -> Mirror:
        found = place or MirrorProgress("run-1", "sheet")
        return Mirror(self.source, sheet, found, keep=lambda _: None, clock=lambda: self.now)

    def close(self) -> None:
        self.source.close()
        self.recorder.close()


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    made = Growing(tmp_path)
    yield made
    made.close()


@pytest.fixture
def sheet() -> Sheet:
    return Sheet()


@pytest.fixture
def mirror(growing: Growing, sheet: Sheet) -> Mirror:
    return growing.mirror(sheet)


def test_each_step_once_and_the_newest_when_it_has_settled(growing: Growing, mirror: Mirror, sheet: Sheet) -> None:
    growing.commit(1, PAGE + 20)
    mirror.catch_up(whole=False)
    assert sheet.steps == [*range(1, PAGE + 20)]
    assert sheet.flushed == len(sheet.numbers)
    growing.commit(PAGE + 21, PAGE + 22)
    mirror.catch_up(whole=False)
    assert sheet.steps[-1] == PAGE + 21
    growing.now += 10
    mirror.catch_up(whole=False)
    mirror.catch_up(whole=True)
    assert sheet.steps == [*range(1, PAGE + 23)]
    values = sheet.points[0][2]
    assert (values["train/loss"], values["train/tokens_per_second"]) == (2.5, 8192.0)
    assert (values["nodes/node-0/tokens_per_second"], values["nodes/node-0/backward_seconds"]) == (100.0, 0.5)


def test_another_session_goes_on_from_the_place(growing: Growing, tmp_path: Path) -> None:
    first, second, file = Sheet(), Sheet(), MirrorProgressFile(tmp_path / "place.json")
    growing.commit(1, 5)
    growing.say("five", 5)
    growing.recorder.evaluation(5, 1005.0, 2.25, 512.0, 0.5, {"eval/kl": 0.125})
    mirror = growing.mirror(first)
    mirror.catch_up(whole=True)
    file.save(mirror.place)
    growing.commit(6, 8)
    growing.mirror(second, file.load("run-1", "sheet")).catch_up(whole=True)
    assert (first.steps, second.steps) == ([1, 2, 3, 4, 5], [6, 7, 8])
    assert (first.losses, second.losses, second.texts) == ([(5, 2.25)], [], [])
    assert first.texts == [(5, "step 5: [note] five (anna)")]
    assert first.numbers + second.numbers == [*range(10)]
    with pytest.raises(InvalidInputError, match="belongs to run run-1 in sheet; use a different --output"):
        file.load("run-2", "sheet")
    with (
        file.held(),
        pytest.raises(InvalidInputError, match="another mirror is writing there"),
        MirrorProgressFile(file.path).held(),
    ):
        pass


def test_a_step_that_is_redone_is_told_again(growing: Growing, mirror: Mirror, sheet: Sheet) -> None:
    growing.commit(1, 6)
    mirror.catch_up(whole=True)
    growing.recorder.retract_after(3)
    mirror.catch_up(whole=True)
    assert (sheet.backs, mirror.place.step) == ([3], 3)
    growing.commit(4, 7, SECOND, loss=9.0)
    mirror.catch_up(whole=True)
    told = [(step, attempt, values["train/loss"]) for step, attempt, values in sheet.points[6:]]
    assert told == [(step, 2, 9.0) for step in (4, 5, 6, 7)]
    mirror.catch_up(whole=True)
    assert sheet.backs == [3] and len(sheet.points) == 10
    # The last of them alone, over a gap of several pages.
    growing.commit(8 + 3 * PAGE, 8 + 3 * PAGE, SECOND)
    mirror.catch_up(whole=True)
    growing.commit(8 + 3 * PAGE, 8 + 3 * PAGE, m.Generation(1, 3))
    mirror.catch_up(whole=True)
    assert sheet.backs == [3, 7] and sheet.points[-1][1] == 3


def test_answers_are_told_once_and_again_after_going_back(growing: Growing, mirror: Mirror, sheet: Sheet) -> None:
    sheet.forgets = True
    growing.commit(1, 4)
    for step in (2, 4):
        growing.recorder.sample(sample("run-1", step, 1000.0 + step))
    mirror.catch_up(whole=False)
    assert sheet.texts == [(2, "def → return 2")], "step 4 isn't settled"
    growing.commit(5, 9)
    mirror.catch_up(whole=False)
    mirror.catch_up(whole=True)
    assert sheet.texts[1:] == [(4, "def → return 4")]
    growing.recorder.retract_after(3)
    growing.commit(4, 6, m.Generation(1, 2))
    growing.recorder.sample(sample("run-1", 4, 2004.0))
    mirror.catch_up(whole=True)
    assert sheet.texts[2:] == [(4, "def → return 4")] * 2


def test_events_are_told_once_and_late_ones_where_they_come(growing: Growing, mirror: Mirror, sheet: Sheet) -> None:
    growing.say("began", None)
    growing.commit(1, 4)
    for text in ("one", "two"):
        growing.say(text, 2)
    growing.say("three", 4)
    mirror.catch_up(whole=False)
    assert [step for step, _ in sheet.texts] == [0, 2]  # step 4 isn't settled
    assert sheet.texts[1][1].count("\n") == 1
    growing.commit(5, 9)
    growing.say("late", 2)
    mirror.catch_up(whole=False)
    assert sheet.texts[2:] == [(4, "step 4: [note] three (anna)\nstep 2: [note] late (anna)")]
    growing.say("later", 2)
    mirror.catch_up(whole=False)
    growing.say("newest", 9)
    mirror.catch_up(whole=False)
    assert sheet.texts[3:] == [(5, "step 2: [note] later (anna)")]
    growing.now += 10
    mirror.catch_up(whole=False)
    assert sheet.texts[4:] == [(9, "step 9: [note] newest (anna)")]


@pytest.mark.parametrize("forgets", [False, True])
def test_what_a_target_has_dropped_is_told_again(growing: Growing, mirror: Mirror, sheet: Sheet, forgets: bool) -> None:
    sheet.forgets = forgets
    growing.commit(1, 6)
    growing.say("three", 3)
    growing.say("five", 5)
    growing.recorder.evaluation(5, 1005.0, 2.25, 512.0, 0.5)
    mirror.catch_up(whole=True)
    growing.recorder.retract_after(3)
    growing.commit(4, 6, SECOND)
    mirror.catch_up(whole=True)
    assert [step for step, _ in sheet.texts] == ([3, 5, 5] if forgets else [3, 5])
    assert sheet.losses == [(5, 2.25), (5, 2.25)]  # its step was retracted too


def test_steps_that_go_back_over_a_jump_of_their_numbers(growing: Growing, mirror: Mirror, sheet: Sheet) -> None:
    growing.commit(1, PAGE + 30)
    growing.commit(10**12, 10**12 + 3)
    mirror.catch_up(whole=True)
    growing.recorder.retract_after(PAGE + 20)
    mirror.catch_up(whole=True)
    assert (sheet.backs, mirror.place.step) == ([PAGE + 20], PAGE + 20)


def test_events_whose_numbers_others_have_taken(growing: Growing, mirror: Mirror, sheet: Sheet) -> None:
    growing.commit(1, 3)
    for text in ("one", "two"):
        growing.say(text, 1)
    mirror.catch_up(whole=True)
    growing.recorder.retract_after(3, event=1)
    growing.now += 1
    growing.say("another", 3)
    mirror.catch_up(whole=True)
    assert [text for _, text in sheet.texts][-1] == "step 3: [note] another (anna)"
    assert len(sheet.texts) == 2


def test_evaluations_that_come_late_and_are_no_number(growing: Growing, mirror: Mirror, sheet: Sheet) -> None:
    growing.commit(1, 5)
    mirror.catch_up(whole=True)
    growing.recorder.evaluation(5, 1006.0, math.nan, 512.0, 0.5)
    mirror.catch_up(whole=True)
    mirror.catch_up(whole=True)
    assert len(sheet.losses) == 1 and math.isnan(sheet.losses[0][1])
    growing.recorder.evaluation(5, 1007.0, 2.0, 512.0, 0.5)
    mirror.catch_up(whole=True)
    assert sheet.losses[1:] == [(5, 2.0)]
    assert sheet.perplexities == [None, pytest.approx(math.exp(2.0))]


def test_perplexity_is_of_losses_per_token_only() -> None:
    view = run_view(1)
    assert of_evaluation(2.0, view) == {"eval/loss": 2.0, "eval/perplexity": pytest.approx(math.exp(2.0))}
    pairs = msgspec.structs.replace(view, loss_unit="nats per pair")
    assert of_evaluation(2.0, pairs, {"eval/kl": 0.5}) == {"eval/loss": 2.0, "eval/kl": 0.5}


COSTS = ("cost", "cost_per_hour", "cost_to_end", "cost_per_1000_samples", "energy_joules")


def test_a_step_with_a_cost_has_it_to_the_end_and_per_thousand_too() -> None:
    view = msgspec.structs.replace(run_view(1), state="finished", steps=100, global_batch=24, samples=720)
    step = msgspec.structs.replace(records.step(40), cursor=960, samples=24, step_seconds=0.5)
    priced = msgspec.structs.replace(step, values={"cost": 4.8, "cost_per_hour": 3.6, "energy_joules": 7.0})
    found = of_step(priced, (), {}, view).values
    assert [found[f"train/{name}"] for name in COSTS] == pytest.approx([4.8, 3.6, 0.03, 5.0, 7.0])
    skips = msgspec.structs.replace(view, skipped=((480, 160),))
    assert of_step(priced, (), {}, skips).values["train/cost_per_1000_samples"] == pytest.approx(6.0)
    assert not of_step(step, (), {}, view).values.keys() & {f"train/{name}" for name in COSTS}
    assert "train/cost_to_end" not in of_step(priced, (), {}, None).values


def test_nodes_of_several_ranks_have_a_prefix_for_each_and_tables_become_dotted_names() -> None:
    assert prefixes({0: "studio", 1: "mbp", 2: "mbp"}) == {
        0: "nodes/studio", 1: "nodes/mbp/rank-1", 2: "nodes/mbp/rank-2"
    }  # fmt: skip
    assert flat({"a": {"b": 1, "c": None}, "d": [1, 2]}) == {"a.b": 1, "d": "[1, 2]"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "tensorboard", "--offline"], "--offline: applies only to --to wandb: remove it"),
        (["--to", "tensorboard"], "tensorboard needs tensorboardX; in a trainctl checkout, run: pip install"),
        (["--to", "wandb"], "wandb needs its library; in a trainctl checkout, run: pip install '.[wandb]'"),
    ],
)
def test_what_is_wrong_is_one_line_and_makes_nothing(
    growing: Growing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    for name in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("tensorboard", "wandb"):
        monkeypatch.delitem(sys.modules, f"trainctl.tui.export.mirror.{name}", raising=False)
    done = call("mirror", growing.folder, *words, "--output", tmp_path / "out")
    assert_one_line(done, 2, says)
    assert not (tmp_path / "out").exists()
