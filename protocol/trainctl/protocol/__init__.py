"""Everything that crosses a wire or is kept: messages, codec, sockets, clients, the record and the run file."""

# The build reads it here.
__version__ = "0.3.0.dev0"
