"""The output of a calibration for its agent: one JSON object per line."""

from typing import Annotated

import msgspec
from msgspec import Meta

from trainctl.protocol.calibration.profile import DeviceProfile


class CalibrationProgress(msgspec.Struct, frozen=True, tag_field="type", tag="progress"):
    """A line for people."""

    text: str


class CalibrationTrying(msgspec.Struct, frozen=True, tag_field="type", tag="trying"):
    """The next measurement: if the system kills the process before another line, memory has run out for this."""

    micro: Annotated[int, Meta(ge=1)] | None = None  # micro-batch of passes or steps; None: something else


class CalibrationPoint(msgspec.Struct, frozen=True, tag_field="type", tag="profile"):
    """One more measurement: the profile so far. The last one is the calibration's result."""

    profile: DeviceProfile


class CalibrationWaits(msgspec.Struct, frozen=True, tag_field="type", tag="waits"):
    """It is ready for a stage, which other calibrations of the machine aren't; repeated as a sign of life."""

    stage: int


CalibrationLine = CalibrationProgress | CalibrationTrying | CalibrationPoint | CalibrationWaits
