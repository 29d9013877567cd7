"""The thin Textual widgets that draw styled lines, the fields, and the bars at a screen's bottom. Imports commands,
state and text."""
