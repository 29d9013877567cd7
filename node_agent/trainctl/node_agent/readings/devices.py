"""Readings of accelerators and sensors, each reader in a thread of its own: a driver may take its time to answer.

Utilisation and power of an Apple GPU need its IOReport counters, which `macmon` (a program of its own) reads without
root. What is absent or cannot be read is None, never zero.
"""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import psutil

from trainctl.protocol.machine.devices import apple_chip
from trainctl.protocol.machine.nvidia import visible
from trainctl.protocol.messages import ClockLimit, GpuProcess, GpuReading

STALE_SECONDS = 5.0
"""Seconds after which a reading is stale and ignored."""


CLOCK_LIMITS: Final[tuple[tuple[int, ClockLimit], ...]] = ((0x60, "thermal"), (0x84, "power"), (0x08, "hardware"))
"""Bits of NVML's reasons for a lower clock: thermal slowdown by software or hardware, power cap or brake, hardware."""


MOST_PROCESSES = 16
"""Processes of a device that are looked at."""


@dataclass(frozen=True)
class Readings:
    gpus: tuple[GpuReading, ...] = ()
    temperature_celsius: float | None = None  # of the processor


class DeviceReader(ABC):
    """One source of readings."""

    @abstractmethod
    def read(self) -> Readings | None:
        """The next reading; may block. None: there will be no more."""

    def interrupt(self) -> None:  # noqa: B027
        """Make a `read` that waits for more than a driver return; called from another thread."""

    def close(self) -> None:  # noqa: B027
        """Let the source go, if there is anything to; called from the thread that reads."""


class NvidiaReader(DeviceReader):
    """All NVIDIA devices, through NVML. Raises OSError if there is no driver or its Python module is not installed."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise OSError(str(error)) from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from None

    def read(self) -> Readings:
        return Readings(tuple(self._device(handle) for handle in self._visible()))

    def close(self) -> None:
        self._ask(self._nvml.nvmlShutdown)

    def _visible(self) -> list[Any]:
        """Handles of the devices that a trainer sees, in its order: `cuda:0` is the first of them."""
        nvml = self._nvml
        count = self._ask(nvml.nvmlDeviceGetCount) or 0
        handles = [self._ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if chosen is None:
            return [handle for handle in handles if handle is not None]
        known = {_text(self._ask(nvml.nvmlDeviceGetUUID, handle)): handle for handle in handles if handle is not None}
        return visible(chosen, handles, known)

    def _device(self, handle: Any) -> GpuReading:
        nvml = self._nvml
        name = self._ask(nvml.nvmlDeviceGetName, handle)
        usage = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuReading(
            name=_text(name) or "NVIDIA",
            utilization_percent=float(usage.gpu) if usage is not None else None,
            clock_mhz=_float(self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)),
            power_watts=milliwatts / 1000 if milliwatts is not None else None,
            temperature_celsius=_float(self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)),
            memory_used_bytes=int(memory.used) if memory is not None else None,
            memory_total_bytes=int(memory.total) if memory is not None else None,
            clock_limits=clock_limits(self._clock_reasons(handle)),
            others=tuple(self._processes(handle)),
        )

    def _clock_reasons(self, handle: Any) -> int:
        """Bits; 0 if this device doesn't give them. Older libraries know them by another name."""
        nvml = self._nvml
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return self._ask(ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0

    def _processes(self, handle: Any) -> Iterator[GpuProcess]:
        """All that compute on a device and can be seen from here: in a container its own."""
        for used in (self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ())[:MOST_PROCESSES]:
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(used.pid)
                with process.oneshot():
                    yield GpuProcess(used.pid, process.name(), process.username(), used.usedGpuMemory)

    def _ask(self, question: Callable[..., Any], *values: Any) -> Any:
        """The answer, None if this device does not give it."""
        try:
            return question(*values)
        except self._nvml.NVMLError:
            return None


def clock_limits(reasons: int) -> tuple[ClockLimit, ...]:
    """Return what lowers a device's clock, by NVML's bits; an idle device and a clock that somebody set are no
    limits."""
    return tuple(limit for bits, limit in CLOCK_LIMITS if reasons & bits)


class AppleReader(DeviceReader):
    """The GPU of an Apple chip, from `macmon pipe`. Raises OSError if it is not on PATH or cannot be run."""

    def __init__(self, program: str = "macmon") -> None:
        path = shutil.which(program)
        if path is None:
            raise FileNotFoundError(f"{program} is not on PATH")
        self._name = f"{apple_chip() or 'Apple'} GPU"
        self._process = subprocess.Popen(
            [path, "pipe"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def read(self) -> Readings | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return parse_macmon(line, self._name) if line else None

    def interrupt(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def parse_macmon(line: str, name: str = "Apple GPU") -> Readings:
    """One line of `macmon pipe`, of the format before and since its fields `gpu_freq_mhz` and `gpu_active_ratio`."""
    try:
        raw = json.loads(line)
    except ValueError:
        return Readings()
    if not isinstance(raw, dict):
        return Readings()
    older = raw.get("gpu_usage")
    clock, ratio = older if isinstance(older, list) and len(older) == 2 else (None, None)
    ratio = _float(raw.get("gpu_active_ratio", ratio))
    found = raw.get("temp")
    temperatures: dict[str, Any] = found if isinstance(found, dict) else {}
    gpu = GpuReading(
        name=name,
        utilization_percent=100 * ratio if ratio is not None else None,
        clock_mhz=_float(raw.get("gpu_freq_mhz", clock)),
        power_watts=_float(raw.get("gpu_power")),
        temperature_celsius=_warm(temperatures.get("gpu_temp_avg")),
    )
    return Readings((gpu,), _warm(temperatures.get("cpu_temp_avg")))


class SensorReader(DeviceReader):
    """The processor's temperature as the system's own sensors give it. Raises OSError where there are none."""

    _CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")

    def __init__(self) -> None:
        if self._hottest() is None:
            raise OSError("no processor temperature sensor")

    def read(self) -> Readings:
        return Readings(temperature_celsius=self._hottest())

    def _hottest(self) -> float | None:
        found = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
        chip = next((found[name] for name in self._CHIPS if found.get(name)), [])
        return max((entry.current for entry in chip if _warm(entry.current) is not None), default=None)


class Watch:
    """Reads a source once a second in a thread; `latest` never blocks."""

    def __init__(self, open_reader: Callable[[], DeviceReader], every_seconds: float = 1.0) -> None:
        self._open, self._every = open_reader, every_seconds
        self._stop = threading.Event()
        self._reader: DeviceReader | None = None
        self._read_at, self._readings = float("-inf"), Readings()
        self._thread = threading.Thread(target=self._watch, name="device-watch", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> Readings:
        """The last reading, an empty one if there is none or it is stale."""
        return self._readings if time.monotonic() - self._read_at < STALE_SECONDS else Readings()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """End the thread; one that hangs in a driver is left to end with the process."""
        self._stop.set()
        if self._reader is not None:
            self._reader.interrupt()
        self._thread.join(timeout_seconds)

    def _watch(self) -> None:
        try:
            self._reader = self._open()
        except OSError:
            return  # this machine has no such device
        while not self._stop.is_set():
            readings = self._reader.read()
            if readings is None:
                break
            # The time last: a reader in between sees the older time, never a newer one than its readings.
            self._readings, self._read_at = readings, time.monotonic()
            self._stop.wait(self._every)
        self._reader.close()


def watch_devices() -> tuple[Watch, ...]:
    """A watch for every kind of device; one without a device ends by itself."""
    return tuple(Watch(reader) for reader in (NvidiaReader, AppleReader, SensorReader))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _warm(value: Any) -> float | None:
    """A temperature; a sensor that isn't there reads 0."""
    celsius = _float(value)
    return celsius if celsius is not None and celsius > 0 else None
