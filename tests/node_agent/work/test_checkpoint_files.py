"""Copies of a checkpoint from the lead: under names that it chooses, only into the work's folder."""

import hashlib
import os
from pathlib import Path

import pytest

from trainctl.node_agent.work import checkpoint_files
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import checkpoints

CONTENT = b"content"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


async def read(name: str, offset: int) -> bytes:
    return CONTENT[offset:]


async def test_files_are_copied_once_and_are_a_checkpoint(tmp_path: Path) -> None:
    folder, asked = tmp_path / "work" / "checkpoint", []

    async def counted(name: str, offset: int) -> bytes:
        asked.append(name)
        return await read(name, offset)

    for _ in range(2):
        await checkpoint_files.copy({"a.json": DIGEST, "b": DIGEST}, folder, 5, "r", counted)
    assert asked == ["a.json"] * 4 + ["b"] * 4
    assert checkpoints.verify(folder).step == 5
    assert checkpoint_files.read_part(folder, "b", 3) == CONTENT[3:]


@pytest.mark.parametrize("name", ["../x", "/x", "", "a\0", ".x"])
async def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    target = name if name != "/x" else str(tmp_path / "x")
    with pytest.raises(InvalidInputError, match="is not a name"):
        await checkpoint_files.copy({"a.json": DIGEST, target: DIGEST}, tmp_path / "work" / "c", 5, "r", read)
    with pytest.raises(InvalidInputError, match="is not a name"):
        checkpoint_files.read_part(tmp_path, target, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["a.json", "manifest.json"])
async def test_no_link_is_written_through(there: str, tmp_path: Path) -> None:
    folder, secret = tmp_path / "work", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("secret")
    (folder / there).symlink_to(secret)
    with pytest.raises(OSError, match="link"):
        await checkpoint_files.copy({"a.json": DIGEST}, folder, 5, "r", read)
    assert secret.read_text() == "secret"
    (folder / there).unlink()
    os.mkfifo(folder / there)
    with pytest.raises(OSError, match="not a regular file"):
        await checkpoint_files.copy({"a.json": DIGEST}, folder, 5, "r", read)
