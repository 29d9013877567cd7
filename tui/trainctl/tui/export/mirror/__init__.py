"""Copies of a run for other programs' viewers, made from its record by a separate process."""
