"""Checkpoints, written atomically and read back: which bits are saved (`files.py`), and when."""
