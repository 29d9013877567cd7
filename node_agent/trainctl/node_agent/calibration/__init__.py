"""Calibrations of this node: measuring process, link to the lead, stored profiles, and the one that fits."""
