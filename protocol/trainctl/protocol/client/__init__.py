"""Clients of an agent: asyncio, blocking, and one that follows a whole cluster."""
