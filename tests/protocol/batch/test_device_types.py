"""16-bit data types by the names of devices."""

import pytest

from trainctl.protocol.batch.device_types import types_of_device

BOTH = ("bfloat16", "float16")


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("cuda:0 NVIDIA A100-SXM4-80GB", BOTH), ("NVIDIA RTX A6000", BOTH), ("NVIDIA H200", BOTH),
        ("Tesla T4", ("float16",)), ("NVIDIA GeForce GTX 1080 Ti", ()), ("NVIDIA of tomorrow", None),
        ("gpu Apple M1 Pro", ("float16",)), ("gpu Apple M2 Ultra", BOTH), ("Apple M4 Max GPU", BOTH),
        ("mps", None), ("cpu", None), ("", None),
    ],
)  # fmt: skip
def test_a_name_says_the_types(name: str, types: tuple[str, ...] | None) -> None:
    assert types_of_device(name) == types
