"""Calibrations of this node: the measuring process, the link to the lead, the stored profiles, and which one fits."""
