"""The Profile screen: phases by rank, the operators of one, older profiles, and copies of the traces."""

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.tui.support.driving import until
from tests.tui.support.pictures import Pictures, at_columns
from tests.tui.support.recorded import Recorded, app_of, source_of

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.tui.screens import step_profile_view as view
from trainctl.tui.text.styled_line import plain

SECONDS = {"data": 0.03, "forward": 1.9, "backward": 4.1, "sync": 0.6, "optimizer": 0.4}
OPERATORS = ("aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::mul", "aten::native_layer_norm")
CONTENT = os.urandom(100_000)


def profiled(node: str, rank: int, first: int, *, factor: float = 1.0, device: bool = False, **more: Any) -> e.Profiled:
    def phase(name: str, seconds: float) -> m.PhaseProfile:
        seconds *= factor
        found = tuple(
            m.OperatorTime(name, 84 * (at + 1), seconds / 2 ** (at + 1), 0.8 * seconds / 2 ** (at + 1) if device else 0)
            for at, name in enumerate(OPERATORS if name in ("forward", "backward") else ())
        )
        return m.PhaseProfile(name, seconds, 0.8 * seconds if device else 0.0, found)

    return e.Profiled(
        node, rank, first, first + 2, f"rank-{rank}.steps-{first}-{first + 2}.trace.json.gz", len(CONTENT),
        hashlib.sha256(CONTENT).hexdigest(), tuple(phase(*item) for item in SECONDS.items()), 0.041, **more,
    )  # fmt: skip


def events(*data: e.AnyEvent) -> tuple[m.Event, ...]:
    return by_command(dict.fromkeys(data, "c" * 36))


def by_command(found: dict[e.AnyEvent, str]) -> tuple[m.Event, ...]:
    """Events with their commands."""
    return tuple(
        m.Event(id=at + 1, at=1000.0 + at, severity="info", by="auto", data=one, command=command)
        for at, (one, command) in enumerate(found.items())
    )


OLDER = profiled("studio", 0, 40), profiled("mbp", 1, 40)
NEWER = (
    profiled("studio", 0, 122),
    profiled("mbp", 1, 122, factor=1.6, lacks="MLX records no operators: the trace has only the wall times"),
    profiled("forge", 2, 122, factor=0.3, device=True),
    e.ProfileFailed("mini", "its trainer ended before the trace was written"),
)
MIXED = by_command(dict.fromkeys(OLDER, "a" * 36) | dict.fromkeys(NEWER, "b" * 36))
FAILED = events(e.ProfileFailed("mini", "the disk is full"))


def source_with(found: tuple[m.Event, ...]) -> Recorded:
    source = source_of(4)
    source.known_step_profiles = found
    source.known_traces = {(one.data.node, one.data.file): CONTENT for one in found if isinstance(one.data, e.Profiled)}
    return source


def test_ranks_that_one_command_asked_are_one_profile_with_its_failures() -> None:
    older, newest = view.profiles_of(MIXED)
    labels = [[group.label(rank) for rank in group.ranks] for group in (older, newest)]
    assert labels == [["studio", "mbp"], ["studio", "mbp", "forge"]]
    assert (older.failed, [failure.node for failure in newest.failed]) == ((), ["mini"])
    text = view.text(newest)
    assert text.startswith("profile of steps 122 to 124\n")
    assert "no profile from mini: its trainer ended before the trace was written" in text
    made = view.objects(newest)
    assert [rank["node"] for rank in made["ranks"]] == ["studio", "mbp", "forge"]
    assert made["ranks"][0]["phases"][1]["operators"][0]["seconds"] == 0.95
    (pair,) = view.profiles_of(events(profiled("a", 0, 5), profiled("a", 1, 5), profiled("b", 2, 5)))
    assert [pair.label(rank) for rank in pair.ranks] == ["a:0", "a:1", "b"]


def test_the_newest_profile_is_that_of_the_newest_command_though_the_run_went_back() -> None:
    mixed = by_command({OLDER[0]: "b" * 36, profiled("studio", 0, 20): "a" * 36, OLDER[1]: "b" * 36})
    first, newest = view.profiles_of(reversed(mixed))
    assert (first.first_step, len(first.ranks), newest.first_step) == (40, 2, 20)


def test_a_rank_that_ended_early_counts_its_own_steps() -> None:
    short = msgspec.structs.replace(profiled("mbp", 1, 40), last_step=40)
    (group,) = view.profiles_of(events(OLDER[0], short))
    assert (group.first_step, group.last_step) == (40, 42)
    assert "forward: 0.63 s per step" in view.text(group) and "forward: 1.90 s per step" in view.text(group)


def test_the_share_on_a_gpu_is_of_its_kernels() -> None:
    rows = view.operator_rows(profiled("forge", 2, 5, device=True).phases[1], 80)
    assert rows[1].split() == ["aten::addmm", "84", "0.95", "s", "0.76", "s", "50%"]


async def test_the_screen_of_a_failed_profile_shows_why_and_takes_all_keys() -> None:
    app = app_of(source_with(FAILED))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.live.run is not None)
        await pilot.press("7")
        await until(pilot, lambda: "mini: the disk is full" in body(app))
        await pilot.press("down", "right", "left", "pageup", "pagedown", "f")
        assert "profile of no steps" in body(app)


@pytest.mark.parametrize(("columns", "rows"), [(40, 8), (200, 60)])
def test_lines_have_their_size_whatever_the_names_are(columns: int, rows: int) -> None:
    odd = profiled("n" * 60, 9, 5, lacks="\x1b[2J\t" + "w" * 400)
    (group,) = view.profiles_of(events(odd, *(profiled(f"node{at}", at, 5) for at in range(8))))
    for phase in group.phases:
        for column in range(len(group.ranks)):
            made = [plain(line) for line in view.lines(group, phase, column, columns, rows)]
            assert len(made) == rows and {len(line) for line in made} == {columns}
            assert not any("\x1b" in line or "\t" in line for line in made)


@at_columns(80, 120)
async def test_the_screen(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_with(MIXED)), columns, "7", "down", "right", "right")


async def test_the_screen_of_a_run_without_a_profile(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_with(())), 80, "7")


async def test_keys_choose_phase_rank_and_profile_and_copy_the_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_of(source_with(MIXED))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.live.run is not None)
        await pilot.press("7")
        await until(pilot, lambda: "steps 122 to 124, 2 of 2" in body(app))
        assert "data on studio" in body(app)
        await pilot.press("down", "right", "right", "right")
        assert "forward on forge" in body(app)
        await pilot.press("pageup")
        assert "steps 40 to 42, 1 of 2" in body(app)
        assert "forward on mbp" in body(app)
        await pilot.press("f")
        assert app.live.run is not None
        folder = tmp_path / f"{app.live.run.run}-profiles"
        wanted = {f"{node}-rank-{rank}.steps-40-42.trace.json.gz" for node, rank in (("studio", 0), ("mbp", 1))}
        await until(pilot, lambda: folder.is_dir() and {path.name for path in folder.iterdir()} == wanted)
        assert all((folder / name).read_bytes() == CONTENT for name in wanted)
        await pilot.press("pagedown")
        assert "steps 122 to 124, 2 of 2" in body(app)
        await pilot.press("enter")
        await until(pilot, lambda: app.screen.is_modal)


def body(app: Any) -> str:
    return "\n".join(plain(line) for line in app.screen.lines(120, 38)) if hasattr(app.screen, "lines") else ""
