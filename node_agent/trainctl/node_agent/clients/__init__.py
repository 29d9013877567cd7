"""The request socket: routing, fair queueing, queries and redirects to the lead."""
