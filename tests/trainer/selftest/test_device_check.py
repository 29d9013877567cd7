"""The device check on the CPU, and on devices that multiply, count or fail wrongly."""

import numpy as np
import pytest

from trainctl.trainer.selftest import device_check
from trainctl.trainer.selftest.checked_device import Device, DeviceMemory
from trainctl.trainer.selftest.device_check import HELD_BYTES, check_device


class Fake:
    """A device whose arrays are NumPy's, with faults to plant."""

    def __init__(self, error=0.0, counted=1.0, refuses="out of memory"):
        self.used, self._error, self._counted, self._refuses = 0, error, counted, refuses

    def device(self):
        return Device(
            title="fake gpu", is_host=False, facts={}, product=self._product, hold=self._hold, memory=self._memory,
            empty=lambda: None, is_out_of_memory=lambda error: "out of memory" in str(error),
        )  # fmt: skip

    def _product(self, left, right, dtype):
        return (left @ right) * np.float32(1 + self._error)

    def _hold(self, size):
        if size > HELD_BYTES and self._refuses:
            raise RuntimeError(self._refuses)
        self.used += int(size * self._counted)
        return Held(self, int(size * self._counted))

    def _memory(self):
        return DeviceMemory(self.used, self.used)


class Held:
    def __init__(self, owner, size):
        self._owner, self._size = owner, size

    def __del__(self):
        self._owner.used -= self._size


@pytest.mark.parametrize(
    ("fake", "status", "says"),
    [
        (Fake(), "ok", ""),
        (Fake(error=1e-4), "failed", "a float32 product differs by 1.0e-04 from float64"),
        (Fake(counted=0.0), "failed", "the memory counter rose by 0 bytes for 67,108,864"),
        (Fake(refuses="kernel panic"), "failed", "failed with an error that isn't recognized: kernel panic"),
        (Fake(refuses=""), "failed", "succeeded"),
    ],
)
def test_each_fault_of_a_device_is_found(monkeypatch, fake, status, says):
    monkeypatch.setattr(device_check, "_opened", lambda backend, name: fake.device())
    outcome = check_device("torch", "fake")
    assert (outcome.status, says in " ".join(outcome.evidence)) == (status, True), outcome.evidence


@pytest.mark.parametrize("backend", ["mlx", pytest.param("torch", marks=pytest.mark.tier("all"))])
def test_the_processor_multiplies_right(backend):
    outcome = check_device(backend, "cpu")
    assert outcome.status == "ok", outcome.evidence
    assert set(outcome.figures["products"]) == {"float32", "bfloat16", "float16"}
    assert all(one["repeats"] for one in outcome.figures["products"].values())
