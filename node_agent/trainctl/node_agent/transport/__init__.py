"""Sockets between agents, the live publisher, and multicast DNS."""
