"""Who talks to whom: the message types of each conversation, and how its frames are decoded."""

import typing
from typing import Any

from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec

UNIONS: dict[str, Any] = {
    "client to agent": m.ClientRequest,
    "agent to client": m.AgentReply,
    "published by an agent": m.Live | m.Heartbeat,
    "agent to trainer": m.ToTrainer | m.WorkSlice,
    "trainer to agent": m.FromTrainer | m.WorkAsk,
    "lead to follower": m.ToPeer,
    "follower to lead": m.FromPeer,
    "kept by followers": m.Kept,
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


def types_of(conversation: str) -> tuple[type[m.Message], ...]:
    """The message types of a conversation, in the order of its union."""
    return typing.get_args(UNIONS[conversation])


def tag_of(kind: type[m.Message]) -> str:
    """The value of a message's `type`."""
    return str(kind.__struct_config__.tag)
