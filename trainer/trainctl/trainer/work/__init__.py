"""Separate work: a worker process that applies a checkpoint's model to slices of rows."""
