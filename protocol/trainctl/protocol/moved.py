"""Import paths that the docs and examples of 0.1.0 named: they still work, and say where things are now."""

import warnings


def warn(old: str, new: str) -> None:
    """Warn importers of the module `old` that its names are in `new` now."""
    warnings.warn(f"{old} is now {new}; the old name will be removed", DeprecationWarning, stacklevel=3)
