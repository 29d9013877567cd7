"""Text for a terminal, pure: figures and times in words, styled lines, characters by alphabet. Imports no other folder
of this room."""
