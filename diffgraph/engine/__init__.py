"""Recording and replaying any torch code: segments, the breaks between them, and what is watched meanwhile."""
