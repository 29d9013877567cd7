"""One module per policy; its only instance is POLICY."""
