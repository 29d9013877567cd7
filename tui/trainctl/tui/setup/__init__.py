"""First files, new machines over SSH, and discovery."""
