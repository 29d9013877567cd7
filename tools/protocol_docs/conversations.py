"""The conversations: the message types of each conversation, and how its frames are decoded."""

import typing
from typing import Any

from trainctl.protocol.messages import (
    AgentReply,
    ClientRequest,
    FromPeer,
    FromTrainer,
    Heartbeat,
    Kept,
    Live,
    Message,
    ToPeer,
    ToTrainer,
    WorkAsk,
    WorkSlice,
)
from trainctl.protocol.wire import codec

UNIONS: dict[str, Any] = {
    "client to agent": ClientRequest,
    "agent to client": AgentReply,
    "published by an agent": Live | Heartbeat,
    "agent to trainer": ToTrainer | WorkSlice,
    "trainer to agent": FromTrainer | WorkAsk,
    "lead to follower": ToPeer,
    "follower to lead": FromPeer,
    "kept by followers": Kept,
}
"""The seven conversations with their message types, and what followers keep of a run."""

DECODERS: dict[str, Any] = {
    "client to agent": codec.decode_control,
    "agent to client": codec.decode_reply,
    "published by an agent": codec.decode_live,
    "agent to trainer": codec.decode_order,
    "trainer to agent": codec.decode_answer,
    "lead to follower": codec.decode_control,
    "follower to lead": codec.decode_peer,
    "kept by followers": codec.decode_kept,
}
"""The function that reads each conversation's frames. An agent has one socket for its clients and for the lead's
agent."""


def types_of(conversation: str) -> tuple[type[Message], ...]:
    """The message types of a conversation, in the order of its union."""
    return typing.get_args(UNIONS[conversation])


def tag_of(kind: type[Message]) -> str:
    """The value of a message's `type`."""
    return str(kind.__struct_config__.tag)
