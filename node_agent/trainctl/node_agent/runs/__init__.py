"""One run from its file to its end: preflight, launch, session, restore and recovery."""
