"""Examples of every message: the vectors of tests/golden/wire.jsonl, each a message as JSON and the bytes of its frame.

To add or change a vector, write its `name`, `conversation` and `message` into the file, then run
`python -m tools.protocol_docs.examples`, which writes the frames. A version's vectors change only
when its version does.
"""

import json
import sys
from typing import Any

import msgspec

from tools.protocol_docs import generated
from tools.protocol_docs.conversations import DECODERS, UNIONS
from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.messages import Message
from trainctl.protocol.wire import codec

FILE = generated.ROOT / "tests" / "golden" / "wire.jsonl"


def _message(line: dict[str, Any]) -> Message:
    """Return the message of a line. JSON has null for NaN, so an up-to-date frame goes before it."""
    try:
        message: Message = DECODERS[line["conversation"]](bytes.fromhex(line.get("frame", "")))
        if _plain(message) == line["message"]:
            return message
    except ProtocolError:
        pass
    return msgspec.json.decode(  # type: ignore[no-any-return]
        msgspec.json.encode(line["message"]), type=UNIONS[line["conversation"]]
    )


def _plain(message: Message) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(message))  # type: ignore[no-any-return]


EXAMPLES: dict[str, dict[str, Message]] = {}
"""Conversation -> name -> message; a name is the message's tag, and what sets a variant of it apart."""
for _line in map(json.loads, FILE.read_text("utf-8").splitlines()):
    EXAMPLES.setdefault(_line["conversation"], {})[_line["name"]] = _message(_line)


def vector(conversation: str, name: str) -> dict[str, str | dict[str, Any]]:
    """Return a line of the golden file: the message as plain values (NaN as null) and its frame in hexadecimal."""
    message = EXAMPLES[conversation][name]
    return {
        "name": name,
        "conversation": conversation,
        "message": _plain(message),
        "frame": codec.encode(message).hex(),
    }


def page() -> str:
    """Return the golden file: one vector per line."""
    lines = [vector(talk, name) for talk, examples in EXAMPLES.items() for name in examples]
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(generated.main("tools.protocol_docs.examples", page, FILE))
