"""Calibrations of this node: the process that measures, the stored profiles, and the one that fits a rank."""
