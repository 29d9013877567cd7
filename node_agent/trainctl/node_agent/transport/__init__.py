"""Conversations between agents and their sockets, the live publisher, and what an agent takes when it starts: its
folder's lock and its addresses."""
