"""Who speaks with whom, and the message types that each conversation takes."""

import typing
from typing import Any

from trainctl.protocol.messages.base import Message
from trainctl.protocol.messages.kept import Kept
from trainctl.protocol.messages.peers import FromPeer, ToPeer
from trainctl.protocol.messages.replies import AgentReply
from trainctl.protocol.messages.requests import ClientRequest
from trainctl.protocol.messages.telemetry import Heartbeat, Live
from trainctl.protocol.messages.trainer import FromTrainer, ToTrainer

UNIONS: dict[str, Any] = {
    "client to agent": ClientRequest,
    "agent to client": AgentReply,
    "published by an agent": Live | Heartbeat,
    "agent to trainer": ToTrainer,
    "trainer to agent": FromTrainer,
    "lead to follower": ToPeer,
    "follower to lead": FromPeer,
    "kept by followers": Kept,
}
"""The seven conversations and the types each takes, and what followers keep of a run."""


def types_of(conversation: str) -> tuple[type[Message], ...]:
    """The message types of a conversation, in the order of its union."""
    return typing.get_args(UNIONS[conversation])


def tag_of(kind: type[Message]) -> str:
    """The value of a message's `type`."""
    return str(kind.__struct_config__.tag)
