"""Bytes on a socket: the codec with its size caps, socket options, handshakes, the attach rule, and the end of the
tasks that read them."""
