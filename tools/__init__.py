"""What a checkout is worked on with; the wheel has none of it."""
