"""Profiles for tests."""

from typing import Any

from trainctl.protocol.calibration.profile import DeviceProfile, Pass, ProfileKey

KEY = ProfileKey(
    device="cpu", model_digest="5f" * 32, sequence_length=128, dtype="float32", backend="torch", backend_version="2.10",
    trainctl_version="0.1.0", settings="a1",
)  # fmt: skip


def profile_of(**fields: Any) -> DeviceProfile:
    """A small profile with some fields given."""
    passes = tuple(Pass(micro, 0.01 + 0.002 * micro, 10_000_000 + 500_000 * micro) for micro in (1, 2, 4, 8))
    return DeviceProfile(**{"key": KEY, "created_at": 1_770_000_000.0, "passes": passes, **fields})
