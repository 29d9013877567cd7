"""Pure arithmetic of plans: shares, ranges, the learning-rate schedule (ranks receive only the rate), throughput and
time estimates; imports only protocol."""
