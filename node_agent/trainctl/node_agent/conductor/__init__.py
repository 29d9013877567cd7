"""The pure state machine that turns reports and commands into step plans: no I/O, and the clock is in its state."""
