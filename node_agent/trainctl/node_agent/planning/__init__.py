"""Pure arithmetic of plans: shares, ranges, the learning-rate schedule (ranks are given a rate), throughput and time
estimates; imports only protocol."""
