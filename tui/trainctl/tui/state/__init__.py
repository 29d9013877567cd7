"""What the screens show, as immutable values with pure reducers; no widgets."""
