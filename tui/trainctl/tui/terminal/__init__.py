"""Textual's private parts behind one guard (driver, updates, frame batching), and when to repaint."""
