"""Schedule: the recorded trace of a step and the prefetch that follows it."""
