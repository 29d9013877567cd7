"""A mirror's files, read back: TensorBoard's by its own reader, W&B's transaction log by its own messages."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEADER_BYTES, _BLOCK_BYTES = 7, 32768


class Board(NamedTuple):
    """A run as TensorBoard shows it, by tag and step. A step that is there twice fails the reading."""

    scalars: dict[str, dict[int, float]]
    texts: dict[str, dict[int, str]]
    settings: bytes  # of the hyperparameters' session


def board(folder: Path) -> Board:
    """All event files of a folder as TensorBoard itself reads them, without a limit to what it keeps."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(folder), {"tensors": 0}, dict.fromkeys(("scalars", "text", "hparams"), 0))
    found.Reload()
    plugins = {name: found.PluginTagToContent(name) for name in ("scalars", "text", "hparams")}
    return Board(
        {tag: _once(tag, found.Tensors(tag), lambda one: float(make_ndarray(one))) for tag in plugins["scalars"]},
        {tag.removesuffix("/text_summary"): _once(tag, found.Tensors(tag), lambda one: one.string_val[0].decode())
         for tag in plugins["text"]},
        plugins["hparams"]["_hparams_/session_start_info"] if plugins["hparams"] else b"",
    )  # fmt: skip


def _once(tag: str, events: Any, value: Any) -> dict[int, Any]:
    found = {event.step: value(event.tensor_proto) for event in events}
    assert len(found) == len(events), f"{tag}: a step twice"
    return found


def wandb_records(session: Path) -> Iterator[Any]:
    """The records of one offline session: blocks of a LevelDB log after a header of W&B's own."""
    from wandb.proto import wandb_internal_pb2 as pb

    (file,) = session.glob("*.wandb")
    data, at, whole = file.read_bytes(), _HEADER_BYTES, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last piece
            record = pb.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_rows(session: Path) -> list[dict[str, Any]]:
    """The history of one session."""
    rows = [record.history for record in wandb_records(session) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]
