"""One machine's agent: hosts trainers; leads, records and publishes runs."""
