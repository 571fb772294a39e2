"""What goes into a call and comes out of it: containers, tensors, and when two are the same."""
