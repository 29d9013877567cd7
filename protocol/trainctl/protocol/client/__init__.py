"""Clients of an agent: asyncio, blocking, and one that follows a whole cluster."""

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.client import Client, Connection
from trainctl.protocol.client.cluster import attach_cluster

__all__ = ["BlockingClient", "Client", "Connection", "attach_cluster"]
