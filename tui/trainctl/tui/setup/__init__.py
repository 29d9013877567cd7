"""First files, new machines over SSH, and discovery. Imports doctor, commands and protocol."""
