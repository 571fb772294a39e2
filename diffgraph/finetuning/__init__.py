"""Training steps, recorded: forward, loss, backward and optimizer in one sequence."""
