"""Ways in from other libraries: their checkpoints, and their training loops over an engine."""
