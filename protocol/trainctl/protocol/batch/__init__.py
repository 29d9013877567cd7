"""Pure arithmetic of the global batch, shared by agent and TUI. Standard library only."""
