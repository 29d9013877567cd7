"""A disk's speed is measured without leaving a file, and a folder that can't be written is named."""

from pathlib import Path

import pytest

from trainctl.protocol.machine import disk_speed


def test_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_speed, "PROBE_BYTES", 9 << 20)  # the last part is shorter than between two waits
    found = disk_speed.measure(tmp_path)
    assert found.write > 0 and (found.read is None or found.read > 0)
    assert not [*tmp_path.iterdir()]
    # A slow disk moves less in its time.
    monkeypatch.setattr(disk_speed, "PROBE_SECONDS", 1e-9)
    monkeypatch.setattr(disk_speed, "PROBE_BYTES", 1 << 60)
    assert disk_speed.measure(tmp_path).write > 0
    with pytest.raises(FileNotFoundError):
        disk_speed.measure(tmp_path / "none")
