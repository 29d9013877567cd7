"""The thread that talks to the agent, and what passes between it and the main thread."""
