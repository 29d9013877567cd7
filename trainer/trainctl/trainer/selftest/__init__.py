"""The parts of `trainctl selftest` that compute: products on a device, runs of one rank, sums over an interface."""
