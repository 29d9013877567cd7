"""Clients of an agent: asyncio, blocking, and one that follows a whole cluster."""

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.client import (
    AGAIN_SECONDS,
    ASKING_OTHERS,
    DEFAULT_TIMEOUT_SECONDS,
    GAP_PAGE,
    REFUSED_PAUSE_SECONDS,
    SILENT_AFTER_SECONDS,
    START_SECONDS,
    Attached,
    Client,
    ClientFactory,
    Connection,
    check_reply,
    make_command,
)
from trainctl.protocol.client.cluster import attach_cluster

__all__ = [
    "AGAIN_SECONDS",
    "ASKING_OTHERS",
    "DEFAULT_TIMEOUT_SECONDS",
    "GAP_PAGE",
    "REFUSED_PAUSE_SECONDS",
    "SILENT_AFTER_SECONDS",
    "START_SECONDS",
    "Attached",
    "BlockingClient",
    "Client",
    "ClientFactory",
    "Connection",
    "attach_cluster",
    "check_reply",
    "make_command",
]
