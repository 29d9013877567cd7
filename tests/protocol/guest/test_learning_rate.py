"""The learning rate of torch's optimizers, set while each scheduler of torch and transformers runs."""

from collections.abc import Callable
from typing import Any

import pytest

from trainctl.guest.learning_rate import LearningRate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
STEPS = 30


def torch_schedulers() -> dict[str, Callable[[Any], Any]]:
    from torch.optim import lr_scheduler as s

    return {
        "none": lambda opt: None,
        "LambdaLR": lambda opt: s.LambdaLR(opt, lambda epoch: 1 / (1 + epoch)),
        "MultiplicativeLR": lambda opt: s.MultiplicativeLR(opt, lambda epoch: 0.95),
        "StepLR": lambda opt: s.StepLR(opt, 4, 0.5),
        "MultiStepLR": lambda opt: s.MultiStepLR(opt, [3, 9, 21]),
        "ConstantLR": lambda opt: s.ConstantLR(opt, 0.5, 12),
        "LinearLR": lambda opt: s.LinearLR(opt, 0.1, total_iters=20),
        "ExponentialLR": lambda opt: s.ExponentialLR(opt, 0.93),
        "PolynomialLR": lambda opt: s.PolynomialLR(opt, 40),
        "CosineAnnealingLR": lambda opt: s.CosineAnnealingLR(opt, STEPS),
        "CosineAnnealingWarmRestarts": lambda opt: s.CosineAnnealingWarmRestarts(opt, 7),
        "CyclicLR": lambda opt: s.CyclicLR(opt, 0.01, 0.1, step_size_up=5),
        "OneCycleLR": lambda opt: s.OneCycleLR(opt, 0.3, total_steps=STEPS + 5),
        "SequentialLR": lambda opt: s.SequentialLR(opt, [s.ConstantLR(opt), s.ExponentialLR(opt, 0.9)], [8]),
        "ChainedScheduler": lambda opt: s.ChainedScheduler([s.ConstantLR(opt), s.ExponentialLR(opt, 0.9)]),
        "ReduceLROnPlateau": lambda opt: s.ReduceLROnPlateau(opt, patience=2),
    }


def scheduler(name: str, optimizer: Any) -> Any:
    if name in (known := torch_schedulers()):
        return known[name](optimizer)
    special = {
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
        "warmup_stable_decay": {"num_decay_steps": 5, "num_stable_steps": 10},
        "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    }
    return transformers.get_scheduler(
        name, optimizer, num_warmup_steps=3, num_training_steps=STEPS + 1, scheduler_specific_kwargs=special.get(name)
    )


class Loop:
    """Two groups of weights under SGD, and a scheduler."""

    def __init__(self, name: str) -> None:
        weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
        groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.01}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.scheduler = scheduler(name, self.optimizer)
        self.rate = LearningRate(self.optimizer)
        self.used: list[list[float]] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.used.append(self.rates()))

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self) -> None:
        sum((weight**2).sum() for group in self.optimizer.param_groups for weight in group["params"]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        elif self.scheduler is not None:
            self.scheduler.step()


def bare(name: str) -> list[list[float]]:
    loop = Loop(name)
    for _ in range(STEPS):
        loop.step()
    return loop.used


NAMES = [*torch_schedulers(), *(one.value for one in transformers.SchedulerType if one.value != "greedy")]


@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_schedule_keeps_its_shape_to_zero_and_back_and_after_a_resume(name: str) -> None:
    own, loop = bare(name), Loop(name)
    doubled = 2 * own[10][0] if own[10][0] else 0.0
    for at in range(STEPS):
        if at == 5:
            assert loop.rate.set(0.0, "scale") == (pytest.approx(own[5][0]), 0.0)
        if at == 10:
            loop.rate.set(doubled, "scale")
        if at == 20:
            resumed = Loop(name)
            resumed.optimizer.load_state_dict(loop.optimizer.state_dict())
            if loop.scheduler is not None:
                resumed.scheduler.load_state_dict(loop.scheduler.state_dict())
            resumed.used, loop = loop.used, resumed
        loop.step()
        assert loop.rates() == (own[at + 1] if at + 1 < STEPS else loop.rates())  # schedulers see their own
    used = loop.used
    assert used[:5] == own[:5] and used[5:10] == [[0.0, 0.0]] * 5
    expected = [[2 * rate for rate in rates] for rates in own[10:]]
    assert used[10:] == [pytest.approx(rates, rel=1e-12, abs=0) for rates in expected]


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_keeps_the_groups_in_proportion_and_a_scale_ends_it(name: str) -> None:
    own, loop = bare(name), Loop(name)
    for at in range(STEPS):
        if at == 6:
            loop.rate.set(1e-3, "set")
        if at == 9:
            loop.rate.set(0.0, "set")
        if at == 12:
            loop.rate.set(5e-3, "set")
        if at == 16 and own[16][0]:
            assert loop.rate.set(own[16][0], "scale") == (5e-3, own[16][0])
        loop.step()
    share = own[6][1] / own[6][0] if own[6][0] else 0.1
    assert loop.used[6:9] == [pytest.approx([1e-3, 1e-3 * share], rel=1e-12)] * 3
    assert loop.used[9:12] == [[0.0, 0.0]] * 3 and loop.used[12][0] == 5e-3
    if own[16][0]:
        assert loop.used[16:] == [pytest.approx(rates, rel=1e-12, abs=0) for rates in own[16:]]


def test_a_schedule_at_zero_is_not_scaled() -> None:
    loop = Loop("linear")  # warms up from 0
    with pytest.raises(ValueError, match="schedule=set"):
        loop.rate.set(0.1, "scale")
    loop.rate.set(0.1, "set")
    loop.step()
    assert loop.used == [pytest.approx([0.1, 0.01])]


def test_a_step_that_raises_and_removal_leave_the_own_rate() -> None:
    loop = Loop("none")
    loop.rate.set(0.5, "scale")

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = loop.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError):
        loop.step()
    handle.remove()
    loop.step()
    assert loop.used[-1] == pytest.approx([0.5, 0.05]) and loop.rates() == [0.1, 0.01]
    loop.rate.remove()
    loop.step()
    assert loop.used[-1] == [0.1, 0.01]


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.Adam([weight], lr=rate)
    held = LearningRate(optimizer)
    held.set(0.3, "scale")
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(rate)))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert (
        seen == [pytest.approx(0.3)] and optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.1)
    )
    assert float(held.used) == pytest.approx(0.3)


def test_what_is_no_optimizer_of_torch_says_why() -> None:
    assert "offer set-lr" in LearningRate(object()).refusal
