"""Pure arithmetic of the global batch, shared by agent and TUI. Imports messages, calibration, config and errors."""
