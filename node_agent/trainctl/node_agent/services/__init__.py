"""The agent as a service: what launchd or systemd is told, and what the agent does for whoever supervises it."""
