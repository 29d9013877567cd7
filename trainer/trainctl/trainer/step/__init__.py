"""One plan on one rank: micro-batches, progress, the sum, the update, and state transfer between ranks."""
