"""`trainctl demo`: local agents, a real small model, real text."""
