"""What to record before it is asked for, and what was asked for."""
