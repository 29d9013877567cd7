"""Everything that touches Textual's private parts: the driver, partial updates, repaint scheduling."""
