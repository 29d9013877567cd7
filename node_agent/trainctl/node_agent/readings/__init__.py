"""Readings of this machine: CPU, memory, pressure, quotas, swap, disk, network, devices, energy, our own processes."""
