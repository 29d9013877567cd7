"""First files, and new machines over SSH. Imports doctor, commands and protocol."""
