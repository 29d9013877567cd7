"""The program's state: immutable values with pure reducers, and the feeds that update them; no widgets. Imports text
and protocol."""
