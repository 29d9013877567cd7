"""Pure advice before a run: predictions for sets of nodes, what would change them, a checklist."""
