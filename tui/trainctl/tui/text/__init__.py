"""Text for a terminal: formatted numbers and times, styled lines, also of a run's rates, cost and energy, and text in
ASCII. Pure; imports no other folder of this package."""
