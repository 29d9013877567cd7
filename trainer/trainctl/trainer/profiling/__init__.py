"""Profiles of some steps on command: what is recorded, the trace's file, and the operators of each phase."""
