"""Steps from files of metrics, as they grow."""

import json
import sys
from pathlib import Path

import pytest
from tests.waiting import until

from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.exec.metric_files import FileStep, MetricFile


def of(path: Path) -> MetricFile:
    return MetricFile(path, clock=lambda: 1000.0)


def add(path: Path, *lines: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def test_json_lines_are_steps_once_the_next_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    file = of(path)
    assert file.read() == []
    add(path, '{"step": 0, "loss": 2.5, "lr": 0.1, "acc": 0.5, "note": "x", "ok": true}\n', '{"step": 0, "val_')
    assert file.read() == []
    add(path, 'loss": 3}\nnot JSON\n[1]\n{"step": 1, "train/loss": "nan", "gpu": {"0": 7}}\n')
    values = {"acc": 0.5, "eval_loss": 3.0}
    assert file.read() == [FileStep(1, 1000.0, 0.0, loss=2.5, learning_rate=0.1, values=values)]
    (last,) = file.read(to_the_end=True)
    assert last.number == 2
    assert last.loss != last.loss
    assert last.values == {"gpu/0": 7.0}
    assert file.read(to_the_end=True) == []


def test_steps_count_rows_without_a_number_and_times_are_the_files(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    add(path, "loss,timestamp,epoch\n", "1.5,1700000000,1\n", "1.25,1700000004,1\n", "1,1700000005,2\n")
    steps = of(path).read(to_the_end=True)
    assert [(step.number, step.loss, step.seconds) for step in steps] == [(1, 1.5, 0.0), (2, 1.25, 4.0), (3, 1.0, 1.0)]
    assert [step.values for step in steps] == [{"epoch": 1.0}, {"epoch": 1.0}, {"epoch": 2.0}]


def test_steps_that_are_apart_share_the_time_between_them(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for number, at in ((10, 1.7e9), (20, 1.7e9 + 5)):
        add(path, json.dumps({"global_step": number, "_timestamp": at, "loss": 1}) + "\n")
    assert [(step.number, step.seconds) for step in of(path).read(to_the_end=True)] == [(10, 0.0), (20, 0.5)]


def test_a_step_that_has_passed_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    add(path, *(f'{{"step": {number}}}\n' for number in (1, 2, 3, 2, 4)))
    file = of(path)
    assert [step.number for step in file.read(to_the_end=True)] == [1, 2, 3, 4]
    assert file.older == 1


def test_a_file_that_is_begun_again_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    add(path, "step,loss\n1,2\n2,1\n")
    file = of(path)
    assert [step.number for step in file.read()] == [1]
    path.write_text("step,loss\n3,9\n")
    assert [step.number for step in file.read(to_the_end=True)] == [2, 3]


@pytest.mark.parametrize("library", ["torch", "tensorboardX"])
def test_event_files_are_followed_while_they_grow(tmp_path: Path, library: str) -> None:
    if library == "torch":
        from torch.utils.tensorboard.writer import SummaryWriter
    else:
        from tensorboardX import SummaryWriter
    file = of(tmp_path / "logs")
    assert file.read() == []
    writer = SummaryWriter(str(tmp_path / "logs"))
    for number in range(3):
        writer.add_scalar("train/loss", 3 - number, number)
        writer.add_scalar("train/accuracy", number / 4, number)
        writer.add_text("note", "no number", number)
    steps: list[FileStep] = []
    until(lambda: writer.flush() or steps.extend(file.read()) or len(steps) == 2, 60, "two whole steps")
    assert [(step.number, step.loss, step.values) for step in steps] == [
        (1, 3.0, {"train/accuracy": 0.0}),
        (2, 2.0, {"train/accuracy": 0.25}),
    ]
    writer.add_scalar("train/loss", 0.5, 3)
    writer.close()
    assert [(step.number, step.loss) for step in file.read(to_the_end=True)] == [(3, 1.0), (4, 0.5)]


def test_event_files_without_their_library_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboardX.proto.event_pb2", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInputError, match=r"--metrics.*tensorboardX.*pip install"):
        MetricFile(tmp_path)
