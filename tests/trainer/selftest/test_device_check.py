"""The device check on the CPU, and on devices that multiply, count or fail wrongly."""

from typing import Any

import numpy as np
import pytest

from trainctl.trainer.selftest import device_check
from trainctl.trainer.selftest.checked_device import Array, Device, DeviceMemory
from trainctl.trainer.selftest.device_check import HELD_BYTES, check_device


class Fake:
    """A device whose arrays are NumPy's, with faults to plant."""

    def __init__(self, error: float = 0.0, counted: float = 1.0, refuses: str = "out of memory") -> None:
        self.used, self._error, self._counted, self._refuses = 0, error, counted, refuses

    def device(self) -> Device:
        return Device(
            title="fake gpu", is_host=False, facts={}, product=self._product, hold=self._hold, memory=self._memory,
            empty=lambda: None, is_out_of_memory=lambda error: "out of memory" in str(error),
        )  # fmt: skip

    def _product(self, left: Array, right: Array, dtype: str) -> Array:
        return (left @ right) * np.float32(1 + self._error)

    def _hold(self, size: int) -> Any:
        if size > HELD_BYTES and self._refuses:
            raise RuntimeError(self._refuses)
        self.used += int(size * self._counted)
        return Held(self, int(size * self._counted))

    def _memory(self) -> DeviceMemory:
        return DeviceMemory(self.used, self.used)


class Held:
    def __init__(self, owner: Fake, size: int) -> None:
        self._owner, self._size = owner, size

    def __del__(self) -> None:
        self._owner.used -= self._size


def checked(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> Any:
    monkeypatch.setattr(device_check, "_opened", lambda backend, name: fake.device())
    return check_device("torch", "fake")


def test_a_right_device_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = checked(monkeypatch, Fake())
    assert outcome.status == "ok", outcome.evidence
    memory = outcome.figures["memory"]
    assert memory["during"]["used_bytes"] - memory["before"]["used_bytes"] == HELD_BYTES


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        (Fake(error=1e-4), "a float32 product differs by 1.0e-04 from float64; at most 1e-05 is expected"),
        (Fake(counted=0.0), "the memory counter rose by 0 bytes for 67,108,864"),
        (Fake(refuses="kernel panic"), "failed with an error that isn't recognized: kernel panic"),
        (Fake(refuses=""), "succeeded"),
    ],
)
def test_each_fault_is_found(monkeypatch: pytest.MonkeyPatch, fake: Fake, says: str) -> None:
    outcome = checked(monkeypatch, fake)
    assert outcome.status == "failed"
    assert says in " ".join(outcome.evidence)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_processor_multiplies_right(backend: str) -> None:
    outcome = check_device(backend, "cpu")
    assert outcome.status == "ok", outcome.evidence
    assert set(outcome.figures["products"]) == {"float32", "bfloat16", "float16"}
    assert all(one["repeats"] for one in outcome.figures["products"].values())


def test_a_device_that_is_not_there_is_no_failure() -> None:
    assert check_device("torch", "cuda:63").status == "not here"
