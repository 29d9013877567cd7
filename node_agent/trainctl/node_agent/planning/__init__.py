"""Pure arithmetic of plans: shares, ranges, learning rate, throughput and time estimates; imports only protocol."""
