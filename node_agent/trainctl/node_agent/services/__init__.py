"""The agent as a service: what launchd or systemd gets, and what the agent does for whoever supervises it."""
