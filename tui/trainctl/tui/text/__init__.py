"""Text for a terminal, pure: figures and times in words, styled lines, the characters of each alphabet. Imports no other
folder of this room."""
