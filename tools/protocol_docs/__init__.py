"""Makes docs/protocol*.md, docs/protocol.schema.json and the wire vectors from the message types. Not in the wheel."""
