"""One rank: model, data, step, checkpoint and metrics."""
