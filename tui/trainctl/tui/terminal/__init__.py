"""Access to Textual's private parts behind one guard (driver, updates, frame batching), and repaint timing."""
