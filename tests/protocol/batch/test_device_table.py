"""The table of devices: by their drivers' names, and by the names that cluster files give."""

import pytest

from trainctl.protocol.batch.device_table import (
    DEVICES,
    datasheet_tflops,
    device_named,
    device_of,
    no_such_device,
    types_of_device,
)


def test_names_of_drivers_say_the_device_and_its_16_bit_types() -> None:
    devices = {
        "cuda:0 NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA H100 PCIe": None,
        "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB", "NVIDIA A100-SXM4-40GB": "A100 40GB", "gpu Apple M2 Ultra": None,
        "Tesla T4": "T4", "NVIDIA GeForce RTX 4090": "GeForce RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    }  # fmt: skip
    assert {name: getattr(device_of(name), "name", None) for name in devices} == devices
    both = ("bfloat16", "float16")
    types = {
        "cuda:0 NVIDIA A100-SXM4-80GB": both, "NVIDIA RTX A6000": both, "Tesla T4": ("float16",),
        "NVIDIA GeForce GTX 1080 Ti": (), "NVIDIA of tomorrow": None, "gpu Apple M1 Pro": ("float16",),
        "gpu Apple M2 Ultra": both, "Apple M4 Max GPU": both, "mps": None, "cpu": None, "": None,
    }  # fmt: skip
    assert {name: types_of_device(name) for name in types} == types


def test_each_device_is_found_by_its_name_in_a_cluster_file_and_by_its_title() -> None:
    for one in DEVICES:
        assert device_named(one.key) is one
        assert device_of(one.title) is one
        assert one.peak(one.dtypes[0]) == pytest.approx(one.tflops * 1e12)
        assert one.peak("float32") is None
    assert device_named("RTX-4090") is device_named("rtx4090")
    assert [datasheet_tflops("cuda:0 NVIDIA H200", dtype) for dtype in ("bfloat16", "float32")] == [989.0, None]
    assert device_named("abacus") is None
    assert "no device 'abacus'; known are a100, a100-40gb, a100-pcie-40gb" in no_such_device("abacus")
