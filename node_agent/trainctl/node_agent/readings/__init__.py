"""Readings of this machine: CPU, memory, disk, devices, energy and our own processes."""
