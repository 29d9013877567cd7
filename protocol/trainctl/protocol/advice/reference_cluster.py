"""A reference beside the user's nodes: eight A100 in one machine, from their datasheet. Pure."""

from typing import Final

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts
from trainctl.protocol.advice.node_speed import ERRORS
from trainctl.protocol.advice.plans import JOULES_PER_KWH, time_of
from trainctl.protocol.batch.against_profile import sum_seconds
from trainctl.protocol.batch.device_table import DEVICES, USED_PART
from trainctl.protocol.calibration.profile import LinkRate

COUNT: Final = 8
_DEVICE: Final = DEVICES[0]
LEAST_SECONDS: Final = 0.02
"""Seconds of a step below which such a device waits for its host, so that its peak says nothing."""
OTHER_MEMORY: Final = 60_000_000
"""Bytes beside the trainer's estimate that a CUDA device needs at least."""


class ReferenceCluster(msgspec.Struct, frozen=True):
    """What the run would take there, in bfloat16: an estimate."""

    name: str
    fits: bool | None  # with the smallest micro-batch
    samples_per_second: float
    tokens_per_second: float
    step_seconds: float
    expected_seconds: float
    energy_kwh: float  # of the devices alone, at most
    assumed: str


def reference_of(facts: AdviceFacts) -> ReferenceCluster | None:
    """None if the model's sizes aren't known, the global batch has too few samples, or its steps
    would be too short to keep such devices busy."""
    run, flops = facts.run, facts.run.sample_flops
    if not flops or run.gradient_bytes is None or run.global_batch < COUNT:
        return None
    share = -(-run.global_batch // COUNT)
    link = LinkRate("", _DEVICE.nvlink_bytes_per_second, _DEVICE.nvlink_bytes_per_second)
    step = share * flops / (USED_PART * _DEVICE.tflops * 1e12) + sum_seconds(run.gradient_bytes, COUNT, [link])
    left = time_of(facts, step, ERRORS["estimated"], [facts.nodes[0].name])
    if step < LEAST_SECONDS:
        return None
    rate = run.global_batch / step
    estimates = [int(node.memory.peak(1)) for node in facts.nodes if node.memory is not None]
    return ReferenceCluster(
        name=f"{COUNT} x {_DEVICE.name}",
        fits=min(estimates) + run.gradient_bytes + OTHER_MEMORY <= _DEVICE.memory_bytes if estimates else None,
        samples_per_second=rate, tokens_per_second=rate * run.tokens_per_sample, step_seconds=step,
        expected_seconds=left.expected, energy_kwh=COUNT * _DEVICE.watts * left.expected / JOULES_PER_KWH,
        assumed=f"bfloat16 at {USED_PART:.0%} of {_DEVICE.tflops:.0f} TFLOPS each, NVLink",
    )  # fmt: skip
