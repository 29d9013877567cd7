"""Training by mlx-lm as a guest: rows of each iteration, and orders between two."""

from pathlib import Path
from typing import Any

import pytest
from tests.protocol.support.line_server import LineServer
from tests.waiting import until

mx = pytest.importorskip("mlx.core")
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy  # noqa: E402
from mlx_lm.tuner.datasets import CacheDataset  # noqa: E402
from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback  # noqa: E402
from mlx_lm.tuner.trainer import train as mlx_train  # noqa: E402

from trainctl import guest  # noqa: E402
from trainctl.guest import mlx_lm as adapter  # noqa: E402

BOTH: list[tuple[str, dict[str, Any]]] = [("evaluate", {}), ("checkpoint", {})]


class Tiny(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(8, 32)

    def __call__(self, ids: Any) -> Any:
        return self.out(self.drop(self.embed(ids)))


class Losses(TrainingCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.train: list[float] = []
        self.rates: list[float] = []
        self.held_out: dict[int, float] = {}

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self.train.append(train_info["train_loss"])
        self.rates.append(train_info["learning_rate"])

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        self.held_out[val_info["iteration"]] = val_info["val_loss"]


class Data:
    """Samples as CacheDataset wants them."""

    def __init__(self, seed: int, count: int) -> None:
        chance = numpy.random.RandomState(seed)
        self.rows = [chance.randint(0, 32, size=chance.randint(6, 12)).tolist() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> list[int]:
        return self.rows[at]

    def process(self, row: list[int]) -> tuple[list[int], int]:
        return row, 0


def train(folder: Path, *, attached: bool = True, schedule: Any = None, data: Any = None, **own: Any) -> Losses:
    mx.random.seed(1)
    numpy.random.seed(1)
    model, losses = Tiny(), Losses()
    mx.eval(model.parameters())
    optimizer = optim.SGD(learning_rate=schedule or 0.1)
    settings = {"iters": 12, "batch_size": 2, "val_batches": 1, "steps_per_report": 1, "steps_per_eval": 5}
    args = TrainingArgs(**settings | own, adapter_file=str(folder / "adapters.safetensors"))
    held_out = CacheDataset(Data(2, 4))
    more: dict[str, Any] = {"training_callback": losses}
    if attached:
        more = guest.mlx_lm.hooks(model, optimizer, args=args, val_dataset=held_out, training_callback=losses)
    mlx_train(model, optimizer, data or CacheDataset(Data(1, 16)), held_out, args=args, **more)
    return losses


class Ordering(CacheDataset):  # type: ignore[misc]
    """Has orders arrive while the batch of an iteration is read, before the iteration before is over."""

    def __init__(self, server: LineServer, orders: dict[int, list[tuple[str, dict[str, Any]]]]) -> None:
        super().__init__(Data(1, 16))
        self.server, self.orders, self.reads, self.ids = server, orders, 0, list[str]()

    def __getitem__(self, at: int) -> Any:
        self.reads += 1
        if self.reads % 2:  # the first sample of a batch
            for verb, values in self.orders.get(self.reads // 2 + 1, []):
                until(lambda: self.server.of("hello"))
                arrived = guest.attach()._orders.arrived
                before = len(arrived)
                self.ids.append(self.server.order(verb, f"{verb}-{self.reads}-{len(self.ids)}", **values))
                until(lambda: len(arrived) > before)  # noqa: B023
        return super().__getitem__(at)


def column(server: LineServer, name: str) -> list[Any]:
    return [row.get(name, row["values"].get(name)) for _, row in sorted(server.rows.items())]


def test_each_iteration_has_a_row(server: LineServer, tmp_path: Path) -> None:
    bare = train(tmp_path, attached=False)
    losses = train(tmp_path)
    assert losses.train == bare.train and column(server, "loss") == bare.train and len(bare.train) == 12
    assert [*server.rows] == [*range(1, 13)] and set(column(server, "samples")) == {2}
    assert all(12 <= tokens <= 22 for tokens in column(server, "tokens"))
    held_out = {step: row["values"]["eval_loss"] for step, row in server.rows.items() if "eval_loss" in row["values"]}
    assert held_out == {1: bare.held_out[0], **{step: loss for step, loss in bare.held_out.items() if step}}
    assert server.of("end")[-1]["state"] == "finished"


def test_losses_come_when_they_are_reported(server: LineServer, tmp_path: Path) -> None:
    losses = train(tmp_path, steps_per_report=4)
    given = [(step, row["loss"]) for step, row in sorted(server.rows.items()) if "loss" in row]
    assert given == [*zip((4, 8, 12), losses.train, strict=True)] and len(server.rows) == 12


def test_evaluations_and_checkpoints_leave_no_trace(server: LineServer, tmp_path: Path) -> None:
    bare = train(tmp_path, attached=False, iters=24)
    data = Ordering(server, dict.fromkeys(range(2, 22), BOTH))
    steered = train(tmp_path, data=data, iters=24)
    assert steered.train == bare.train and steered.held_out == bare.held_out
    assert {server.outcome(id)["state"] for id in data.ids} == {"applied"} and len(data.ids) == 40
    assert len([*tmp_path.glob("0*_adapters.safetensors")]) == 20


@pytest.mark.parametrize("schedule", [None, optim.exponential_decay(0.1, 0.9)])
def test_a_rate_is_set_to_0_and_back(server: LineServer, tmp_path: Path, schedule: Any) -> None:
    own = train(tmp_path, attached=False, schedule=schedule).rates
    data = Ordering(server, {4: [("set-lr", {"value": 0.0})], 7: [("set-lr", {"value": 0.02})]})
    data.orders[10] = [("set-lr", {"value": 0.03, "schedule": "set"})]
    train(tmp_path, schedule=schedule, data=data)
    assert {server.outcome(id)["state"] for id in data.ids} == {"applied"}
    rates = column(server, "learning_rate")
    first, back = rates.index(0.0), next(at for at, rate in enumerate(rates) if rates[at - 1] == 0.0 < rate)
    last = next(at for at, rate in enumerate(rates) if rate == pytest.approx(0.03))
    assert rates[:first] == own[:first] and 0 < first < back < last
    assert rates[back:last] == pytest.approx([0.02 * rate / own[back] for rate in own[back:last]], rel=1e-6)
    assert rates[last:] == pytest.approx([0.03] * len(rates[last:]))


def test_a_stop_saves_the_weights(server: LineServer, tmp_path: Path) -> None:
    data = Ordering(server, {6: [("stop", {})]})
    train(tmp_path, data=data)
    assert len(server.rows) < 12 and server.of("end")[-1]["state"] == "stopped"
    assert [*tmp_path.glob("0*_adapters.safetensors")] and (tmp_path / "adapters.safetensors").exists()


def test_the_command_line_is_attached_by_name(server: LineServer, tmp_path: Path) -> None:
    from mlx_lm import lora
    from mlx_lm.tuner import callbacks

    own = lora.train
    try:
        guest.mlx_lm.register()
        assert callbacks.get_reporting_callbacks("trainctl") is None
        model, optimizer = Tiny(), optim.SGD(learning_rate=0.1)
        args = TrainingArgs(iters=3, batch_size=2, steps_per_report=1, adapter_file=str(tmp_path / "a.safetensors"))
        lora.train(model=model, args=args, optimizer=optimizer, train_dataset=CacheDataset(Data(1, 8)))
    finally:
        lora.train = own
        callbacks.SUPPORT_CALLBACK.pop("trainctl")
    assert [*server.rows] == [1, 2, 3]


def test_an_unknown_version_is_only_watched(
    server: LineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "KNOWN", ((0, 1), (0, 2)))
    train(tmp_path)
    assert {verb for verb, why in server.of("hello")[-1]["verbs"].items() if not why} == {"note"}
