"""A recorded run played by real agents, with scripted faults."""
