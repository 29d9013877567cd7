"""What crosses a wire or is kept: messages, codec, sockets, clients, the record and the run file."""
