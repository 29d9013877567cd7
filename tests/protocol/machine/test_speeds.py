"""A disk's speed is measured without leaving a file, and a folder that can't be written is named."""

from pathlib import Path

import pytest

from trainctl.protocol.machine import speeds


def test_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "PROBE_BYTES", 9 << 20)  # the last part is shorter than between two waits
    found = speeds.measure_disk(tmp_path)
    assert found.write > 0 and (found.read is None or found.read > 0)
    assert not [*tmp_path.iterdir()]
    # A slow disk moves less in its time.
    monkeypatch.setattr(speeds, "PROBE_SECONDS", 1e-9)
    monkeypatch.setattr(speeds, "PROBE_BYTES", 1 << 60)
    assert speeds.measure_disk(tmp_path).write > 0
    with pytest.raises(FileNotFoundError):
        speeds.measure_disk(tmp_path / "none")
