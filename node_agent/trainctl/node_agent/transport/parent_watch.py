"""A line to the program that started the agent: its standard input, whose end says that no one holds it any more."""

import asyncio
import os
import stat
import sys

from trainctl.protocol.errors import InvalidInputError


def check() -> None:
    """Check that standard input can be watched for its end. Raises InvalidInputError if it is no pipe."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        mode = 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise InvalidInputError("--leash", "standard input is not a pipe")


async def let_go() -> None:
    """Return at the end of standard input; what comes before it is thrown away."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    try:
        while await reader.read(4096):
            pass
    finally:
        transport.close()
