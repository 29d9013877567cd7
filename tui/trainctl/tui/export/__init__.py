"""A run as a table, in TensorBoard or W&B, and its model for other libraries. Imports protocol only."""
