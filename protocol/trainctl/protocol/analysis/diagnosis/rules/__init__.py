"""The rules of a diagnosis: causes with their evidence and remedies, in one table of rows."""
