"""A loop with accelerate as a guest, by the name of a tracker."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from tests.protocol.support.line_server import LineServer
from tests.waiting import until

from trainctl import guest
from trainctl.guest import accelerate as adapter


def train(
    folder: Path, steps: int = 8, accumulation: int = 1, named: bool = True, before: Any = lambda step: None
) -> list[float]:
    guest.register()
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=named)
    accelerator = Accelerator(
        cpu=True, log_with="trainctl", project_config=config, gradient_accumulation_steps=accumulation
    )
    accelerator.init_trackers("mine")
    torch.manual_seed(1)
    model, losses = torch.nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    try:
        for step in range(1, steps + 1):
            for _ in range(accumulation):
                with accelerator.accumulate(model):
                    loss = model(torch.ones(2, 4)).pow(2).mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        before(step)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            losses.append(float(loss))
            accelerator.log({"train_loss": loss.item(), "accuracy": step / 10, "name": "x"}, step=step)
    finally:
        accelerator.end_training()
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_row_for_each_step_with_what_is_logged(server: LineServer, tmp_path: Path, accumulation: int) -> None:
    losses = train(tmp_path, accumulation=accumulation)
    assert [row["loss"] for _, row in sorted(server.rows.items())] == losses and len(losses) == 8
    assert [row["values"] for _, row in sorted(server.rows.items())] == [
        {"user:accuracy": step / 10} for step in range(1, 9)
    ]
    assert [row["learning_rate"] for _, row in sorted(server.rows.items())] == pytest.approx(
        [0.1 * 0.9**step for step in range(8)], abs=1e-12
    )
    assert server.of("hello")[-1]["attach"]["name"] == "mine" and server.of("end")[-1]["state"] == "finished"


def test_orders_are_carried_out_between_steps(server: LineServer, tmp_path: Path) -> None:
    sent: dict[str, str] = {}

    def before(step: int) -> None:
        verb = {3: "checkpoint", 4: "set-lr", 6: "stop"}.get(step)
        if verb is not None:
            until(lambda: server.of("hello"))
            sent[verb] = server.order(verb, **({"value": 0.05} if verb == "set-lr" else {}))
            until(lambda: guest.attach()._orders.arrived)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, before=before)
    outcomes = [server.outcome(id) for id in sent.values()]
    assert [outcome["state"] for outcome in outcomes] == ["applied"] * 3, outcomes
    assert len([*tmp_path.glob("checkpoints/checkpoint_*")]) == 2  # the stop's too
    rates = [row["learning_rate"] for _, row in sorted(server.rows.items())]
    assert rates[3] == pytest.approx(0.05, abs=1e-12) and [*server.rows] == [1, 2, 3, 4, 5]


def test_why_there_is_no_checkpoint(server: LineServer, tmp_path: Path) -> None:
    train(tmp_path, named=False)
    verbs = server.of("hello")[-1]["verbs"]
    assert "automatic_checkpoint_naming" in verbs["checkpoint"] and verbs["set-lr"] == ""


def test_an_unknown_version_is_only_watched(
    server: LineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "KNOWN", ((0, 1), (0, 2)))
    train(tmp_path)
    assert {verb for verb, why in server.of("hello")[-1]["verbs"].items() if not why} == {"note"}
    assert len(server.rows) == 8
