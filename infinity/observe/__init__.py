"""What a run shows of itself: counters, a record a step, live progress, the closing table and the loss curve."""
