"""What is known, as immutable values with pure reducers, and the feeds that keep it up to date; no widgets. Imports
text and protocol."""
