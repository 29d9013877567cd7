"""The Calibration screen: the curves with the peak, earlier profiles behind them, and what became slower."""

import msgspec
from tests.protocol.support.profiles import profile_of
from tests.tui.support.pictures import Pictures, at_columns
from tests.tui.support.recorded import NOW, app_of, source_of

from trainctl.protocol.calibration.profile import DeviceProfile, DiskRate, GridPoint, MatmulRate, Pass
from trainctl.tui.screens import calibration
from trainctl.tui.text.styled_line import plain

RATES = {1: 180.0, 2: 240.0, 3: 262.0, 4: 278.0, 6: 272.0, 8: 265.0, 16: 240.0}


def made(age_hours: float, factor: float, **fields: object) -> DeviceProfile:
    passes = tuple(
        Pass(micro, micro / (rate * factor), int(3e9 + 0.6e9 * micro)) for micro, rate in RATES.items()
    )  # fmt: skip
    return profile_of(
        created_at=NOW - 3600 * age_hours, passes=passes, out_of_memory_micro=32,
        grid=(GridPoint(2, 8, 0.071), GridPoint(4, 4, 0.0612), GridPoint(8, 2, 0.0655)), optimizer_seconds=0.0021,
        matmul=(MatmulRate("float32", 13_600.0 * factor), MatmulRate("bfloat16", 26_900.0)),
        disk=DiskRate(2.9e9, 5.1e9), **fields,
    )  # fmt: skip


PROFILES = (made(1, 0.85), made(50, 1.0), made(400, 0.97))


def shown(profiles: tuple[DeviceProfile, ...], columns: int = 80, rows: int = 23) -> list[str]:
    lines = calibration.profile_lines("studio", profiles, columns, rows, "text", "13:31")
    assert len(lines) == rows
    assert {len(plain(line)) for line in lines} == {columns}
    return [plain(line) for line in lines]


def test_a_machine_that_became_slower_says_what() -> None:
    told = [line for line in shown(PROFILES, 120, 39) if line.startswith("slower: ")]
    assert [line.split(",")[0] for line in told] == ["slower: training", "slower: float32 matmul"]
    assert not any(line.startswith("slower: ") for line in shown((PROFILES[1], PROFILES[0]), 120, 39))


@at_columns(80, 120)
async def test_pictures(pictures: Pictures, columns: int) -> None:
    source = source_of(4)
    source.known_profiles = {"studio": PROFILES}
    await pictures.compare(app_of(source), columns, "2", "C")


async def test_picture_without_a_profile_in_ascii(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(4), in_ascii=True), 80, "2", "C", "tab")


def test_memory_that_is_not_known_is_not_drawn() -> None:
    passes = tuple(Pass(known.micro, known.seconds) for known in PROFILES[0].passes)
    assert any("n/a" in line for line in shown((msgspec.structs.replace(PROFILES[0], passes=passes),)))
