"""What a calibration prints for its agent: one JSON object per line, progress first and the profile last."""

import msgspec

from trainctl.protocol.calibration.profile import DeviceProfile


class CalibrationProgress(msgspec.Struct, frozen=True, tag_field="type", tag="progress"):
    """What is measured now, or has been measured."""

    text: str


class CalibrationResult(msgspec.Struct, frozen=True, tag_field="type", tag="profile"):
    """The end of a calibration."""

    profile: DeviceProfile


class CalibrationWaits(msgspec.Struct, frozen=True, tag_field="type", tag="waits"):
    """Beside other calibrations of the machine: it is ready for a stage."""

    stage: int


CalibrationLine = CalibrationProgress | CalibrationWaits | CalibrationResult
