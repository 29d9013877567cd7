"""Readings of this machine: CPU, memory, pressure, quotas, swap, disk, network, devices, energy, own processes."""
