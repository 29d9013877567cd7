"""Pure arithmetic of the global batch, shared by agent and TUI. Imports only messages, calibration, config and errors."""
