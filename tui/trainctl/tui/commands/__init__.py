"""Commands as a person sees them: forms, previews, prechecks, undo, and dispatch."""
