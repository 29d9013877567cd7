"""Folders that are whole or absent, and the versions of what a rank computes with."""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.trainer.support.synced_disk import ALSO, SyncedDisk, Tree

from trainctl.protocol.machine import nvidia
from trainctl.trainer.common import libraries
from trainctl.trainer.common.atomic_folder import make_folder

WHOLE: Tree = {"made": {"a": b"1", "inner": {"b": b"2"}}}


def fill(work):
    (work / "a").write_bytes(b"1")
    (work / "inner").mkdir()
    (work / "inner" / "b").write_bytes(b"2")


def test_a_power_cut_leaves_a_whole_folder_or_none(tmp_path):
    disk = SyncedDisk(tmp_path)
    with disk.recorded():
        make_folder(tmp_path / "made", fill)
    for moment in disk.moments:
        for also in ALSO:
            assert moment.after_a_cut(also).get("made") in (None, WHOLE["made"]), (moment.call, moment.path, also)
    assert [disk.moments[-1].after_a_cut(also) for also in ALSO] == [WHOLE] * len(ALSO)


def test_a_link_may_lead_nowhere(tmp_path):
    make_folder(tmp_path / "made", lambda work: (work / "link").symlink_to("nowhere"))
    assert (tmp_path / "made" / "link").is_symlink()


def test_others_may_read_files_as_the_umask_says_whatever_a_library_makes_of_them(tmp_path):
    def write(work):
        save_file({"a": np.zeros(2, np.float32)}, work / "a.safetensors")
        (work / "run.sh").touch(0o755)

    before = os.umask(0o027)
    try:
        make_folder(tmp_path / "made", write)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "made").iterdir()}
    assert modes == {"a.safetensors": 0o640, "run.sh": 0o750}


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
