"""Checkpoints: written atomically, and read back."""
