"""The record of a run: SQLite schema, reader, rollups, downsampling, paths and checkpoint manifests."""
