"""Makes docs/protocol*.md, docs/protocol.schema.json and the frames of the wire vectors from the message types."""
