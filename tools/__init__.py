"""Tools for work on a checkout; the wheel has none of them."""
