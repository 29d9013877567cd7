"""Access to Textual's private parts behind one guard (updates, its cache of styles), keys that are typed ahead, and
repaint timing."""
