"""Standard input as a run's data: whole lines in a growing file, whose end is marked whatever happens."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from tests.waiting import until

from trainctl.protocol.config.run_file import end_mark
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.setup import standard_input
from trainctl.tui.setup.standard_input import InputCopy


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[IO[bytes], InputCopy]]:
    """The writing end, and the copy of what is read from the other."""
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as source, os.fdopen(writes, "wb", buffering=0) as target:
        copy = InputCopy(source, "run")
        copy.start()
        yield target, copy
        target.close()
        copy.wait()


def test_only_whole_lines_are_written_until_the_end(pipe: tuple[IO[bytes], InputCopy]) -> None:
    target, copy = pipe
    target.write(b"one\ntw")
    until(lambda: copy.path.read_bytes() == b"one\n")
    target.write(b"o\nthree")
    until(lambda: copy.path.read_bytes() == b"one\ntwo\n")
    assert not end_mark(copy.path).exists()
    target.close()
    copy.wait()
    assert copy.path.read_bytes() == b"one\ntwo\nthree\n"
    assert end_mark(copy.path).exists() and not copy.end()
    assert copy.overrides == {"data.path": str(copy.path), "data.growing": "true"}


def test_an_end_before_the_input_s_own_leaves_half_a_line_out(pipe: tuple[IO[bytes], InputCopy]) -> None:
    target, copy = pipe
    target.write(b"one\ntw")
    until(lambda: copy.lines == 1)
    assert copy.end()
    target.write(b"o\n")
    target.close()
    copy.wait()
    assert copy.path.read_bytes() == b"one\n" and end_mark(copy.path).exists()


def test_nothing_is_left_if_no_run_begins(pipe: tuple[IO[bytes], InputCopy]) -> None:
    target, copy = pipe
    target.write(b"one\n")
    until(lambda: copy.lines == 1)
    copy.discard()
    assert not [*copy.path.parent.iterdir()]


def test_the_run_file_or_an_override_asks_for_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\npath = "-"\n')
    assert standard_input.is_wanted(file, {})
    assert not standard_input.is_wanted(file, {"data.path": "rows.jsonl"})
    file.write_text('[data]\npath = "rows.jsonl"\n')
    assert not standard_input.is_wanted(file, {})
    assert standard_input.is_wanted(file, {"data.path": "-"})


def test_a_terminal_and_an_agent_elsewhere_are_refused() -> None:
    main, side = os.openpty()
    refused = pytest.raises(InvalidInputError, match='"-" is standard input: send it rows')
    with os.fdopen(main, "rb"), os.fdopen(side, "rb", buffering=0) as terminal, refused:
        standard_input.check(terminal, "tcp://127.0.0.1:7474", local=True)
    with (
        Path(os.devnull).open("rb") as source,
        pytest.raises(InvalidInputError, match="needs an agent on this machine"),
    ):
        standard_input.check(source, "tcp://192.0.2.1:7474", local=False)
