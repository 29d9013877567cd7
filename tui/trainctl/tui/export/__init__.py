"""A run's record as CSV, JSON lines or Parquet, and mirrored to TensorBoard or W&B. Imports protocol only."""
