"""Log-probabilities of a preference run's data by its base model, computed before the first step and kept on disk."""
