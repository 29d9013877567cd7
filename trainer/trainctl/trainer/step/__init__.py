"""Parts that the loop and the plans that train nothing work with: a loaded rank, micro-batches, progress, measurements,
and state transfer between ranks."""
