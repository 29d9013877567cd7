"""Text for a terminal: formatted numbers and times, styled lines, also of a run's rates, cost and energy, and ASCII or
Unicode characters. Pure; imports no other folder of this package."""
