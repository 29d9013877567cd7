"""A node reads each run file once for `trainctl doctor`, only files of a disk, and nothing that an exit awaits."""

from pathlib import Path

import pytest
from tests.integration.support.known_run import run_file as run_file_text

from trainctl.node_agent.clients.doctor import Doctor
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A run file, and the data that it names."""
    (tmp_path / "data.txt").write_text("text")
    file = tmp_path / "run.toml"
    file.write_text(run_file_text(tmp_path, tmp_path / "data.txt"))
    return file


def doctor_of(file: Path) -> Doctor:
    return Doctor("box", file.parent, file.parent, lambda: (file,))


def asked(path: Path) -> m.DigestsRequest:
    return m.DigestsRequest(rid="r", what="data", path=str(path))


async def test_a_run_file_is_read_again_only_if_it_has_changed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    read = run_file.read

    def counted(path: Path) -> RunFile:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(run_file, "read", counted)
    doctor, data = doctor_of(own), own.with_name("data.txt")
    for _ in range(3):
        assert (await doctor.digests(asked(data))).digest
        assert not (await doctor.digests(asked(own))).named
    assert len(reads) == 1
    other = own.with_name("other.txt")
    other.write_text("other")
    own.write_text(run_file_text(own.parent, other))
    assert not (await doctor.digests(asked(data))).named
    assert (await doctor.digests(asked(other))).digest
    assert len(reads) == 2
    own.unlink()
    assert not (await doctor.digests(asked(other))).named


@pytest.mark.needs("linux")  # which has /proc
@pytest.mark.parametrize("path", ["/proc/version", "/proc/self/environ"])
async def test_what_the_kernel_makes_as_it_is_read_is_not_read(own: Path, path: str) -> None:
    own.write_text(run_file_text(own.parent, path))
    reply = await doctor_of(own).digests(asked(Path(path)))
    assert (reply.named, reply.digest) == (True, "")
    assert "not on a disk" in reply.problem
