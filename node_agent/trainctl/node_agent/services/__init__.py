"""The agent as a service: its launchd or systemd file, and what the agent does for its supervisor."""
