"""Versions of what a rank computes with: of imported libraries only, and CUDA's on a CUDA device."""

import sys
from types import SimpleNamespace

import pytest

from trainctl.protocol.machine import nvidia
from trainctl.trainer.common import libraries


def test_only_libraries_in_use_are_named(monkeypatch):
    for module in libraries.MODULES.values():
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert list(dict(libraries.versions_in_use("cpu"))) == ["python"]
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace())
    assert list(dict(libraries.versions_in_use("gpu Apple M2"))) == ["python", "numpy"]


@pytest.mark.parametrize(
    ("runtime", "driver", "device", "found"),
    [
        ("12.8", "570.86.10", "cuda:0 NVIDIA H200", {"cuda": "12.8", "driver": "570.86.10"}),
        (None, "", "cuda:0", {}), ("12.8", "570.86.10", "cpu", {}),
    ],
)  # fmt: skip
def test_cuda_is_named_on_its_devices(monkeypatch, runtime, driver, device, found):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=runtime)))
    monkeypatch.setattr(nvidia, "driver_version", lambda: driver)
    versions = dict(libraries.versions_in_use(device))
    assert {name: versions[name] for name in ("cuda", "driver") if name in versions} == found
