"""The merged tail: order, stray lines, bounds, files that are cut or replaced; and what is searched in it."""

from dataclasses import replace

import pytest
from tests.tui.support.logs import logs_of_four
from tests.tui.support.recorded import CLOCK, NOW, run_view

from trainctl.protocol import messages as m
from trainctl.protocol.record.log_format import write
from trainctl.tui.screens import log_view as lv
from trainctl.tui.state import merged_log as lt
from trainctl.tui.state.filter_language import TypedLineError, parse
from trainctl.tui.state.table_schemas import LOGS
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.styled_line import plain

NODES = ("studio", "mbp", "forge", "mini")


def part(text: str, offset: int = 0, size: int | None = None) -> m.LogPart:
    whole = offset + len(text.encode()) if size is None else size
    return m.LogPart(rid="r", run="run", rank=0, offset_bytes=offset, size_bytes=whole, text=text)


def read(tail: lt.LogTail, rank: int, text: str, offset: int = 0, size: int | None = None) -> lt.LogTail:
    return lt.take(tail, NODES[rank], rank, part(text, offset, size), lt.PART_BYTES, NOW)


def merged() -> lt.LogTail:
    tail = lt.LogTail("run")
    for rank, text in logs_of_four().items():
        tail = read(tail, rank, text)
    return tail


def at(seconds: float, text: str, level: str = "INFO") -> str:
    return write(NOW + seconds, level, text) + "\n"


def texts(tail: lt.LogTail) -> list[str]:
    return [entry.text for entry in tail.entries]


def test_lines_of_all_nodes_are_in_the_order_of_their_times() -> None:
    tail = merged()
    times = [entry.at for entry in tail.entries if not entry.stray]
    assert times == sorted(times) and len(tail.entries) == 28
    assert [entry.node for entry in tail.entries[:3]] == ["studio", "mbp", "forge"]


def test_stray_lines_stay_with_the_line_before_them_in_their_file() -> None:
    tail = read(read(lt.LogTail(), 0, at(0, "fails", "ERROR")), 1, at(0, "as well") + at(5, "later"))
    tail = read(tail, 0, "Traceback:\n  File x\nValueError: no\n", offset=tail.files[0].offset or 0)
    assert texts(tail) == ["fails", "Traceback:", "  File x", "ValueError: no", "as well", "later"]
    assert [entry.level for entry in tail.entries[:4]] == ["ERROR", "ERROR", "", "ERROR"]


def test_lines_before_the_first_time_go_with_it_and_without_any_with_when_they_were_read() -> None:
    tail = read(lt.LogTail(), 0, "native start\n" + at(-9, "ready"))
    tail = read(tail, 1, "only native\n")
    assert [(entry.text, entry.at) for entry in tail.entries] == [
        ("native start", NOW - 9), ("ready", NOW - 9), ("only native", NOW),
    ]  # fmt: skip


def test_a_line_is_taken_when_its_end_is_there_and_nothing_is_read_twice() -> None:
    whole = at(0, "first") + at(1, "second")
    tail = lt.LogTail()
    for start in range(0, len(whole), 7):
        assert tail.next_offset(0) == (start if start else -lt.FIRST_BYTES)
        tail = read(tail, 0, whole[start : start + 7], offset=start)
    assert texts(tail) == ["first", "second"]


def test_a_last_line_without_an_end_is_shown_once_nothing_more_comes() -> None:
    tail = read(lt.LogTail(), 0, at(0, "first") + "Killed")
    assert texts(tail) == ["first"]
    tail = read(tail, 0, "", offset=tail.files[0].offset or 0)
    assert texts(tail) == ["first", "Killed"] and tail.entries[1].level == "ERROR"


def test_a_log_is_begun_at_a_whole_line_and_a_new_file_at_its_start() -> None:
    tail = read(lt.LogTail(), 0, "f of a line\n" + at(0, "whole"), offset=5000)
    assert texts(tail) == ["whole"]
    tail = read(tail, 0, "", offset=10, size=10)
    assert tail.next_offset(0) == 0
    assert texts(read(tail, 0, at(3, "again"))) == ["whole", "again"]


def test_what_grows_faster_than_it_is_read_is_left_out_and_said() -> None:
    tail = read(lt.LogTail(), 0, at(0, "one"), size=lt.PART_BYTES + lt.MOST_BEHIND_BYTES + 1)
    assert tail.next_offset(0) == -lt.FIRST_BYTES
    assert (
        read(lt.LogTail(), 0, at(0, "one"), size=lt.PART_BYTES + lt.MOST_BEHIND_BYTES).next_offset(0) == lt.PART_BYTES
    )
    tail = read(tail, 0, "rest\n" + at(9, "two"), offset=900_000)
    assert texts(tail) == ["one", "(834,464 bytes left out)", "two"]


def test_it_is_bounded_and_counts_what_was_dropped() -> None:
    text = "".join(at(step, f"line {step} " + "x" * 2000) for step in range(20))
    tail = lt.LogTail()
    for round_ in range(0, 6000, 20):
        made = text if not round_ else "".join(at(round_ + step, "y") for step in range(20))
        tail = lt.take(tail, "studio", 0, part(made, 10**6 * round_), 10**7, NOW)
        tail = replace(tail, files={0: replace(tail.files[0], offset=10**6 * (round_ + 20))})
    assert len(tail.entries) == lt.MAX_LINES and tail.left_out == 1000
    assert max(len(entry.text) for entry in merged().entries) <= lt.MAX_CHARACTERS


def test_colours_and_progress_bars_are_read_as_a_terminal_shows_them() -> None:
    tail = read(lt.LogTail(), 0, "\x1b[31mred\x1b[0m\r\n 10%|#  |\r100%|###|\n\x1b]0;title\x07said\n")
    assert texts(tail) == ["red", "100%|###|", "said"]


@pytest.mark.parametrize(
    ("typed", "found", "marked"),
    [
        ("JOINED", 6, ["joined"]), ("node:m joined", 2, ["joined"]), (r"~'g1\.[3] joined'", 3, ["g1.3 joined"]),
        ("[W1", 3, ["[W1"]), ("a/b", 0, []), ("/", 0, []), ("joined -node:m -text:g1", 0, []),
        ("joined g1.3 g1", 3, ["joined", "g1.3"]),
    ],
)  # fmt: skip
def test_logs_are_searched_as_tables_are_filtered(typed: str, found: int, marked: list[str]) -> None:
    view = lv.View(query=parse(typed, LOGS))
    kept = view.query.kept(merged().entries)
    assert len(kept) == found
    for entry in kept:
        assert {piece.text for piece in lv._marked(entry, view) if piece.role == "mark"} == {*marked}


@pytest.mark.parametrize(
    ("typed", "column", "says"), [("joined ~(", 9, "can't be read"), ("a /l.te/", 3, "~l.te"), ("level:bad", 7, "info")]
)
def test_a_search_that_is_none_is_named_with_its_column(typed: str, column: int, says: str) -> None:
    with pytest.raises(TypedLineError, match=says) as raised:
        parse(typed, LOGS)
    assert raised.value.column == column


@pytest.mark.parametrize("odd", [1e18, -1e18, float("inf"), float("nan")])
def test_a_line_whose_time_no_date_can_say_is_shown_without_one(odd: float) -> None:
    names = lv.names_of(ViewState(run=run_view(4)))
    entry = next(entry for entry in merged().entries if not entry.stray)
    entries = [entry, replace(entry, at=odd)]
    known, unknown = (
        plain(line) for line in lv.lines(lt.LogTail(), lv.View(), entries, names, CLOCK, columns=60, rows=2)
    )
    assert known[2] == ":" and unknown.startswith("n/a      ") and unknown[8:] == known[8:]
