"""The thread that talks to the agent, and its queues to and from the main thread."""
