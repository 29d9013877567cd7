"""Readings of this machine: CPU, memory, pressure and quotas, swap, disk, network, devices, energy and our own processes."""
