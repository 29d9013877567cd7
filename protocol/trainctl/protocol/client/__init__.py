"""Clients of an agent: asyncio, blocking, and one that follows a whole cluster."""

from trainctl.protocol.client.blocking import BlockingClient as BlockingClient
from trainctl.protocol.client.client import *
from trainctl.protocol.client.cluster import attach_cluster as attach_cluster
