"""Bytes on a socket: the codec with its size caps, socket options, handshakes and the attach rule."""
