"""The check of network interfaces: what it says of an engine that fails, and of sums."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from trainctl.trainer.selftest.interface_check import check_interfaces

LOOPBACK = next(name for name in psutil.net_if_addrs() if name.startswith("lo"))


def test_what_an_engine_says_is_in_the_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an installation of MLX that lacks a library; gloo sums beside it."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('libnccl.so.2: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    found = check_interfaces([LOOPBACK])
    assert found.status == "failed"
    fault, sums = sorted(found.evidence, key=lambda text: "ring" not in text)
    assert fault.startswith(f"{LOOPBACK} ring: joining failed (details in the log of rank ")
    assert fault.count("libnccl.so.2: cannot open shared object file") >= 1
    assert sums.startswith(f"{LOOPBACK} gloo: two ranks summed 4,194,304 bytes")
