"""One machine: hosts trainers, conducts, records and publishes."""
