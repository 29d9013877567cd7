"""The pure state machine that turns reports and commands into step plans: no I/O, the clock is an argument."""
