"""Calibration: what this node's device, memory, disk and data can do, measured with the real model and steps."""
