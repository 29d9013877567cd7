"""Lightning as a guest, by either of its packages: rows of each step, and orders between two."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.protocol.support.line_server import LineServer
from tests.waiting import until
from torch.utils.data import DataLoader, TensorDataset

from trainctl import guest
from trainctl.guest import lightning as adapter

STEPS = 40
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
VERBS = [("evaluate", {}), ("checkpoint", {})]


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def batches(seed: int) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(32, 4, generator=made)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(32, 1, generator=made))
    return DataLoader(data, batch_size=4, shuffle=seed == 1)


def train(package: Any, folder: Path, *callbacks: Any, resume: Path | None = None, **kwargs: Any) -> list[float]:
    """Train; return each step's loss, as the module saw it."""
    losses: list[float] = []

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, index: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            losses.append(float(loss))
            self.log("train_loss", loss)
            self.log("half", loss / 2)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"},
            }

    torch.manual_seed(4)
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "default_root_dir": folder,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "val_check_interval": 4,
        "log_every_n_steps": 50,
    }
    trainer = package.Trainer(**settings | kwargs, callbacks=[*callbacks])
    trainer.fit(Module(), batches(1), batches(2), ckpt_path=resume)
    return losses


def orders(package: Any, server: LineServer, by_step: dict[int, list[tuple[str, dict[str, Any]]]]) -> Any:
    """Return a callback that has orders arrive before certain steps are over."""

    class Orders(package.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.ids: list[str] = []

        def on_train_batch_end(self, trainer: Any, *_: object) -> None:
            for verb, values in by_step.get(trainer.global_step, []):
                arrived = guest.attach()._orders.arrived
                until(lambda: server.of("hello"))
                before = len(arrived)
                self.ids.append(server.order(verb, f"{verb}-{trainer.global_step}-{len(self.ids)}", **values))
                until(lambda: len(arrived) > before)  # noqa: B023

    return Orders()


def column(server: LineServer, name: str) -> list[Any]:
    return [row.get(name, row["values"].get(name)) for _, row in sorted(server.rows.items())]


def test_each_step_has_its_loss_and_values(server: LineServer, tmp_path: Path, package: Any) -> None:
    losses = train(package, tmp_path, adapter.Callback())
    assert [*server.rows] == [*range(1, STEPS + 1)]
    assert column(server, "loss") == losses
    assert column(server, "user:half") == pytest.approx([loss / 2 for loss in losses])
    assert [step for step, row in sorted(server.rows.items()) if "eval_loss" in row["values"]] == [*range(4, 41, 4)]
    assert set(column(server, "samples")) == {4} and column(server, "learning_rate")[0] == 0.05
    assert server.of("hello")[-1]["attach"]["steps"] == STEPS and server.of("end")[-1]["state"] == "finished"


def test_a_step_of_several_batches_has_the_loss_that_is_trained_on(
    server: LineServer, tmp_path: Path, package: Any
) -> None:
    losses = train(package, tmp_path, adapter.Callback(), max_steps=8, accumulate_grad_batches=2)
    pairs = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert column(server, "loss") == pytest.approx(pairs, abs=1e-6) and len(pairs) == 8


def test_evaluations_and_checkpoints_leave_no_trace(server: LineServer, tmp_path: Path, package: Any) -> None:
    def run(*callbacks: Any) -> list[float]:
        stopping = package.callbacks.EarlyStopping("val_loss", patience=6)
        return train(package, tmp_path, stopping, *callbacks)

    bare = run()
    asked = orders(package, server, dict.fromkeys(range(1, 21), VERBS))
    assert run(asked, adapter.Callback()) == bare and len(bare) > 20
    assert {server.outcome(id)["state"] for id in asked.ids} == {"applied"} and len(asked.ids) == 40
    assert all("eval_loss" in server.rows[step]["values"] for step in range(1, 21))
    assert len([*tmp_path.glob("checkpoints/ordered-*.ckpt")]) == 20


def test_a_rate_is_set_to_0_and_back_and_after_resume(server: LineServer, tmp_path: Path, package: Any) -> None:
    own = {"max_steps": 20, "val_check_interval": 8}
    by_step = {
        3: [("set-lr", {"value": 0.01, "schedule": "scale"})],
        5: [("set-lr", {"value": 0.0, "schedule": "scale"})],
        8: [("set-lr", {"value": 0.02, "schedule": "scale"})],
        12: [("stop", {})],
    }
    train(package, tmp_path, orders(package, server, by_step), adapter.Callback(), min_steps=16, **own)
    rates = [0.05] * 3 + [0.01] * 2 + [0.0] * 3
    assert column(server, "learning_rate")[:8] == pytest.approx(rates, rel=0, abs=1e-12)
    assert column(server, "learning_rate")[8] == pytest.approx(0.02, rel=0, abs=1e-12)
    assert [*server.rows] == [*range(1, 13)] and server.of("end")[-1]["state"] == "stopped"
    last = column(server, "learning_rate")[-1]
    server.forget()
    train(package, tmp_path, adapter.Callback(), resume=tmp_path / "checkpoints" / "ordered-step=12.ckpt", **own)
    assert next(iter(server.rows)) == 13 and column(server, "learning_rate")[0] == pytest.approx(last, rel=0, abs=1e-12)


def test_an_error_ends_the_run(server: LineServer, tmp_path: Path, package: Any) -> None:
    class Fails(package.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, *_: object) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train(package, tmp_path, Fails(), adapter.Callback())
    assert server.of("end")[-1] == {"type": "end", "state": "failed", "reason": "RuntimeError: boom"}


def test_an_unknown_version_is_only_watched(
    server: LineServer, tmp_path: Path, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "KNOWN", ((1, 0), (1, 9)))
    train(package, tmp_path, adapter.Callback(), max_steps=4)
    assert {verb for verb, why in server.of("hello")[-1]["verbs"].items() if not why} == {"note"}
    assert [*server.rows] == [1, 2, 3, 4]
