"""Text for a terminal: formatted numbers and times, styled lines, and ASCII or Unicode characters. Pure; imports no
other folder of this package."""
