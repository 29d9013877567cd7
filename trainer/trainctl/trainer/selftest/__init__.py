"""The parts of `trainctl selftest` that compute: products on a device, data types, sums over an interface."""
