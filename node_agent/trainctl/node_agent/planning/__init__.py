"""Pure arithmetic of plans and their results: shares, ranges, the learning-rate schedule (ranks receive only the rate),
throughput and time estimates; imports only protocol."""
