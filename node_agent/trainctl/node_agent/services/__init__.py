"""The agent as a service: its launchd or systemd file and commands, and what the agent does for its supervisor."""
